"""The program of a reward process: scores samples that arrive on a pipe until the pipe closes. Started by `pool.py`.

Messages, in order: the pool sends a list of Part, then lists of Call; the process answers Ready or Broken, then one
Answer a call. A process of its own, not a fork: the trainer has threads, CUDA and communicators that survive none.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import inspect
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from megappo.errors import RewardError
from megappo.experience.sample import RolloutSample
from megappo.rewards.function import as_reward, load_function
from megappo.rewards.rules import math_verify

MATH_VERIFY = "math-verify"


@dataclass(frozen=True)
class Part:
    """What a process can be asked to compute: `path` is `module:function` or MATH_VERIFY."""

    name: str
    path: str


@dataclass(frozen=True)
class Call:
    """One sample to score with one part; `key` comes back with the answer."""

    key: int
    part: int
    sample: RolloutSample


@dataclass(frozen=True)
class Ready:
    """The process has imported its functions."""


@dataclass(frozen=True)
class Broken:
    """The process could not import a function, with the reason."""

    error: str


@dataclass(frozen=True)
class Answer:
    """The score of a call with its details as JSON and its tokens' rewards, or the traceback of what went wrong (then
    `score` is None)."""

    key: int
    score: float | None
    details: str = "{}"
    error: str = ""
    token_scores: tuple[float, ...] | None = None


def serve(connection: Connection, timeout: float) -> None:
    """Answers calls until the pool closes the pipe. `timeout`: seconds of one call of an `async def` function."""
    parts: Sequence[Part] = connection.recv()
    try:
        functions = [_function(part) for part in parts]
    except RewardError as error:
        connection.send(Broken(str(error)))
        return
    connection.send(Ready())
    # One event loop for the life of the process: network clients that a function keeps are bound to theirs.
    with asyncio.Runner() as runner:
        while True:
            try:
                calls: list[Call] = connection.recv()
            except EOFError:
                return
            part, function = parts[calls[0].part], functions[calls[0].part]
            if is_async(function):
                runner.run(_answer_together(connection, part, function, calls, timeout))
            else:
                for call in calls:
                    connection.send(_answer(part, function, call))


def _function(part: Part) -> Callable[[RolloutSample], Any]:
    if part.path != MATH_VERIFY:
        return load_function(part.path)
    # Seconds on a busy machine, which the first sample's time limit must not pay for.
    importlib.import_module("math_verify")
    return math_verify


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a reward function, or the `__call__` of an object, is an `async def`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _answer(part: Part, function: Callable[[RolloutSample], object], call: Call) -> Answer:
    try:
        return _accept(part, call, function(call.sample))
    except Exception:  # noqa: BLE001 - whatever a reward raises is that sample's failure, told to the pool
        return Answer(call.key, None, error=traceback.format_exc())


async def _answer_together(
    connection: Connection, part: Part, function: Callable[[RolloutSample], Any], calls: Sequence[Call], timeout: float
) -> None:
    async def one(call: Call) -> None:
        try:
            async with asyncio.timeout(timeout) as limit:
                result = await function(call.sample)
            answer = _accept(part, call, result)
        except Exception:  # noqa: BLE001 - as in _answer
            late = limit.expired()
            answer = Answer(call.key, None, error=timed_out(timeout) if late else traceback.format_exc())
        connection.send(answer)

    await asyncio.gather(*(one(call) for call in calls))


def timed_out(timeout: float) -> str:
    """The error text of a call that took too long."""
    return f"no result within reward.timeout_seconds={timeout:g}"


def _accept(part: Part, call: Call, result: object) -> Answer:
    reward = as_reward(result, part.path, len(call.sample.response_ids))
    details = json.dumps(dict(reward.details), ensure_ascii=False)
    return Answer(call.key, reward.score, details, token_scores=reward.token_scores)


def _die_with_parent(parent: int) -> None:
    """A trainer that is killed must leave no process behind, not even one that hangs in a reward function."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the trainer ended before its reward process began")


def main() -> None:
    """`python -m megappo.rewards.process PIPE_FD PARENT_PID TIMEOUT`."""
    descriptor, parent, timeout = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    _die_with_parent(parent)
    serve(Connection(descriptor), timeout)


if __name__ == "__main__":
    # Under its own name, so that what is pickled here is found by the pool.
    from megappo.rewards import process

    process.main()
