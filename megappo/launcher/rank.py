"""The main program of one rank: runs a request and, where it fails, claims the failure before its peers notice.

`python -m megappo.launcher.rank COMMAND REQUEST.json` is how the local launcher starts it; under torchrun or srun
`megappo COMMAND` calls `run_rank` itself.
"""

import ctypes
import logging
import os
import signal
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import psutil

from megappo.config.requests import (
    Command,
    ConvertRequest,
    EvaluateRequest,
    GenerateRequest,
    Request,
    TrainRequest,
    layout_options,
)
from megappo.errors import ExitCode
from megappo.launcher.environment import LAUNCHER_PID, failure_folder, own_rank
from megappo.launcher.failure import FAILURE_DIR, Failure, claim_failure
from megappo.launcher.run_status import record_begin, record_end

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
PR_SET_PDEATHSIG = 1
LEAVING_SECONDS = 2.0

_log = logging.getLogger(__name__)


def main(arguments: list[str]) -> ExitCode:
    """Runs the request that the launcher wrote."""
    die_with_launcher()
    command, file = arguments
    request = Command(command).request.model_validate_json(Path(file).read_text(encoding="utf-8"))
    return run_rank(request)


def run_rank(request: Request) -> ExitCode:
    """Runs a request as this rank; does not return where it fails, so that no library waits for dead peers at exit."""
    if isinstance(request, TrainRequest):
        # Kept until the trainer is ready to stop after a step: `StopSignal` lets them through.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    at_end = ExitStack()
    try:
        if own_rank() == 0:
            record_begin(request)
        code = _dispatch(request, at_end)
        # All is saved. Python gives signals their deadly default back while it ends, but for those that are ignored.
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        return code
    except KeyboardInterrupt:
        _leave(ExitCode.FAILED)  # the launcher says that it was interrupted
    # The last frame of the rank: the failure is claimed, not swallowed. BaseException, for torch's CheckpointException
    # is no Exception.
    except BaseException as error:  # noqa: BLE001
        failure = Failure.of(error, own_rank(), layout_options(request))
        if report_failure(failure):
            record_end(request, ExitCode(failure.exit_code))
        _close_in_time(at_end)
        _leave(ExitCode(failure.exit_code))


def _close_in_time(at_end: ExitStack) -> None:
    """Ends engines and reward processes after a failure that is already told; peers may be gone, so that what still
    waits for them after `LEAVING_SECONDS` is left as it is."""

    def close() -> None:
        try:
            at_end.close()
        except Exception:  # noqa: BLE001  the failure before it is the one to tell
            _log.info("closing after a failure has failed too", exc_info=True)

    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    closing.join(LEAVING_SECONDS)


def report_failure(failure: Failure) -> bool:
    """Claims the run's failure, and says whether this is the first, which is printed unless a local launcher does."""
    try:
        is_first, is_kept = claim_failure(failure_folder(), failure), True
    except (OSError, psutil.Error):  # the temporary folder is full, say: better told by every rank than by none
        is_first, is_kept = True, False
    if is_first and not (is_kept and FAILURE_DIR in os.environ):
        print(failure.text, file=sys.stderr, flush=True)
    return is_first


def die_with_launcher() -> None:
    """On Linux, has the kernel kill this rank when its launcher dies, however that happens."""
    launcher = os.environ.get(LAUNCHER_PID)
    if launcher is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):  # it died before the kernel was asked
        _leave(ExitCode.FAILED)


def _dispatch(request: Request, at_end: ExitStack) -> ExitCode:
    from megappo.trainer import run  # here: it imports torch, which only a rank needs

    match request:
        case TrainRequest():
            return run.train(request.config, at_end)
        case EvaluateRequest():
            return run.evaluate(request, at_end)
        case ConvertRequest():
            return run.convert(request)
        case GenerateRequest():
            return run.generate(request)


def _leave(code: ExitCode) -> NoReturn:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
