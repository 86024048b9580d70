"""torchrun that gives its ranks SECONDS after SIGTERM: python launch/torchrun.py SECONDS [arguments of torchrun ...]

torch 2.12 and later have `--shutdown-timeout` for that. torch 2.11 kills the ranks after 30 seconds whatever it is
told, so there one method of its agent is wrapped. launch/torchrun.sh calls this file.
"""

import sys
from inspect import signature

from torch.distributed import run
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import PContext


def main(seconds: int, arguments: list[str]) -> None:
    """Runs torchrun, and ends as it does. SystemExit with the way out where torch has changed too much for it."""
    if has_option():
        arguments = ["--shutdown-timeout", str(seconds), *arguments]
    else:
        wait_for_saving(seconds)
    run.main(arguments)


def has_option() -> bool:
    """Whether this torch's torchrun can be told how long to wait: 2.12 and later."""
    return any("--shutdown-timeout" in action.option_strings for action in run.get_args_parser()._actions)


def wait_for_saving(seconds: int) -> None:
    """Patch for torch 2.11, whose agent closes its ranks with the signal that it got and a time that it doesn't name.

    Where a rank has failed it names no signal: the others, which may hang in a collective, keep the 30 seconds.
    """
    close = PContext.close
    expected = ["self", "death_sig", "timeout"]
    if list(signature(close).parameters) != expected or "timeout" in signature(LocalElasticAgent._shutdown).parameters:
        raise SystemExit(
            "launch/torchrun.py: this torch's torchrun has no --shutdown-timeout, and ends its ranks in another way "
            "than torch 2.11 does; take torch 2.11, or 2.12 or later"
        )

    def patient(self, death_sig=None, timeout=None):
        if timeout is None:
            timeout = 30 if death_sig is None else seconds
        close(self, death_sig, timeout)

    PContext.close = patient


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
