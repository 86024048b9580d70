"""How a run of local ranks ended: its exit code and the one message that the user reads."""

import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megappo.errors import ExitCode
from megappo.launcher.failure import Failure, read_failure

CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)
LOG_LINES = 20


@dataclass(frozen=True)
class Outcome:
    """Exit codes of all ranks (negative: the signal), the first that failed, and what the launcher did."""

    codes: tuple[int, ...]
    failed_first: int | None
    was_interrupted: bool
    was_stopped: bool
    was_killed: bool


@dataclass(frozen=True)
class Message:
    """Exit code of the command, and what is printed to standard error ("" is nothing)."""

    exit_code: ExitCode
    text: str = ""


def tell(outcome: Outcome, claims: Path, log_folder: Path, if_interrupted: Callable[[], str]) -> Message:
    """Exit code and message of a run whose ranks have all ended."""
    if outcome.was_interrupted:
        return Message(ExitCode.FAILED, f"interrupted; {if_interrupted()}")
    if outcome.failed_first is not None:
        return _tell_failure(outcome.failed_first, outcome, read_failure(claims), log_folder)
    if outcome.was_killed:
        return Message(ExitCode.FAILED, _too_late(outcome))
    if ExitCode.STOPPED_AFTER_SAVING in outcome.codes:
        return Message(ExitCode.STOPPED_AFTER_SAVING)
    return Message(ExitCode.DONE)


def _tell_failure(rank: int, outcome: Outcome, claim: Failure | None, log_folder: Path) -> Message:
    code = outcome.codes[rank]
    # A rank aborts (NCCL's watchdog, gloo's threads) also when a peer has failed: then the peer's own words count.
    if code < 0 and not (code == -signal.SIGABRT and claim is not None):
        if code == -signal.SIGTERM and outcome.was_stopped:
            return Message(ExitCode.FAILED, "stopped by a signal before there was anything to save")
        return Message(ExitCode.FAILED, _tell_signal(rank, signal.Signals(-code)) + _tail(rank, log_folder))
    if claim is not None:
        return Message(ExitCode(claim.exit_code), claim.text)
    known = (ExitCode.BAD_INPUT, ExitCode.DOES_NOT_FIT)
    text = f"rank {rank} ended with exit code {code} and gave no reason" + _tail(rank, log_folder)
    return Message(ExitCode(code) if code in known else ExitCode.FAILED, text)


def _tell_signal(rank: int, number: signal.Signals) -> str:
    if number == signal.SIGKILL:
        why = "; the system does that when memory runs out (`dmesg` tells): use smaller micro-batches or more ranks"
    else:
        why = "; it crashed outside Python" if number in CRASHES else ""
    return f"rank {rank} was killed by {number.name}{why}"


def _too_late(outcome: Outcome) -> str:
    late = [str(rank) for rank, code in enumerate(outcome.codes) if code < 0]
    return (
        f"rank {', '.join(late)} had not saved in time after the signal and was ended; raise trainer.stop_grace_seconds"
    )


def _tail(rank: int, log_folder: Path) -> str:
    """The last lines that the rank wrote; rank 0 wrote them to the console already."""
    log = log_folder / f"rank-{rank:05d}.out"
    if not log.exists():
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()[-LOG_LINES:]
    return "\n".join(["; the last it wrote:", *lines]) if lines else ""
