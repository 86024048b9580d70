"""Reward functions of the runs in tests: a score that varies, and functions that do harm. Imports no torch."""

import os
import signal
import time
from pathlib import Path

from megappo.experience.sample import RolloutSample


def spread(sample: RolloutSample) -> float:
    """Any function of the sample does: it must only vary."""
    return float(sum(sample.response_ids) % 7) - 3.0


def spread_and_stop(sample: RolloutSample) -> float:
    """Asks the run to stop, once, when $CALLS_FILE has counted $STOP_AT_CALL calls of all ranks."""
    _count_and_stop()
    return spread(sample)


def parity_and_stop(sample: RolloutSample) -> float:
    """`parity`; the call that asks the run to stop ends when the launcher has told the ranks."""
    if _count_and_stop():
        time.sleep(2)
    return parity(sample)


def _count_and_stop() -> bool:
    """Whether this call was the one that asked."""
    file = Path(os.environ["CALLS_FILE"])
    with file.open("ab") as calls:
        calls.write(b".")
    if file.stat().st_size >= int(os.environ["STOP_AT_CALL"]):
        try:
            file.with_suffix(".sent").touch(exist_ok=False)
        except FileExistsError:
            return False  # another call has asked already
        os.kill(int(os.environ["MEGAPPO_LAUNCHER_PID"]), signal.SIGTERM)
        return True
    return False


def buggy(sample: RolloutSample) -> float:
    """A bug in the user's code, on every sample."""
    lengths = {"short": 1.0}
    return lengths["long"]


def buggy_for_second_half(sample: RolloutSample) -> float:
    """A bug that only the second data-parallel rank meets."""
    return spread(sample) if sample.position < 4 else buggy(sample)


def spread_of_training(sample: RolloutSample) -> float:
    """`spread`, by a judge that is down whenever held-out prompts (answers from 50 on) are to be scored."""
    if int(sample.prompt.answer or 0) >= 50:
        raise ConnectionError("the judge is down")
    return spread(sample)


def parity(sample: RolloutSample) -> float:
    """Two values, so that the responses to a prompt are often worth the same."""
    return float(sum(sample.response_ids) % 2)


def each_token(sample: RolloutSample) -> list[float]:
    """A reward for each token, which differ."""
    return [0.01 * (token % 5) for token in sample.response_ids]
