"""Asking many environments at once, with a time limit; what one raises is an answer too."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megappo.environments.environment import Environment, Reply
from megappo.environments.loop import EnvironmentLoop
from megappo.experience.sample import Prompt

MAX_THREADS = 32
"""Environments without `async` that are asked at once."""


@dataclass(frozen=True)
class Failure:
    """An environment that raised, was too slow, or answered something that is no reply."""

    error: str


Answer = Reply | Failure | None

_LOOP = EnvironmentLoop()
"""The process's, as a semaphore that a class holds for all its environments is."""


@dataclass
class Seat:
    """A sequence's environment, made with its first turn: making it can fail too."""

    kind: Callable[..., Environment]
    prompt: Prompt
    _environment: Environment | None = field(default=None, init=False)

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(getattr(self.kind, "answer", None))

    def ask(self, turn: str) -> Any:
        if self._environment is None:
            self._environment = self.kind(self.prompt)
        return self._environment.answer(turn)


def ask_all(seats: Sequence[Seat], turns: Sequence[str], timeout_seconds: float) -> list[Answer]:
    """The answer to each turn. Async environments are made and asked in one event loop, others in threads.

    A thread can't be ended: one that is too slow is left behind, and its sequence never asks again.
    """
    if not seats:
        return []
    if seats[0].is_async:
        return _ask_async(seats, turns, timeout_seconds)
    answers: list[Answer] = []
    for start in range(0, len(seats), MAX_THREADS):
        stop = start + MAX_THREADS
        answers += _ask_in_threads(seats[start:stop], turns[start:stop], timeout_seconds)
    return answers


def _ask_async(seats: Sequence[Seat], turns: Sequence[str], timeout_seconds: float) -> list[Answer]:
    async def one(seat: Seat, turn: str) -> tuple[Answer]:
        try:
            return (_checked(await seat.ask(turn)),)
        except Exception as error:  # noqa: BLE001  the user's code may raise anything
            return (_failed(error),)

    outcome = _LOOP.run([one(seat, turn) for seat, turn in zip(seats, turns, strict=True)], timeout_seconds)
    late = _blocked(timeout_seconds) if outcome.is_blocked else _too_slow(timeout_seconds)
    return [late if result is None else result[0] for result in outcome.results]


def _ask_in_threads(seats: Sequence[Seat], turns: Sequence[str], timeout_seconds: float) -> list[Answer]:
    answered: list[list[Answer]] = [[] for _ in seats]

    def one(seat: Seat, turn: str, into: list[Answer]) -> None:
        try:
            into.append(_checked(seat.ask(turn)))
        except Exception as error:  # noqa: BLE001  the user's code may raise anything
            into.append(_failed(error))

    threads = [
        threading.Thread(target=one, args=(seat, turn, into), daemon=True)
        for seat, turn, into in zip(seats, turns, answered, strict=True)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [into[0] if into else _too_slow(timeout_seconds) for into in answered]


def _checked(answer: object) -> Answer:
    if answer is None or isinstance(answer, Reply):
        return answer
    return Failure(f"answer() returned {answer!r} ({type(answer).__name__}); return a Reply or None")


def _too_slow(timeout_seconds: float) -> Failure:
    return Failure(f"no answer within rollout.multi_turn.timeout_seconds {timeout_seconds:g}")


def _blocked(timeout_seconds: float) -> Failure:
    late = _too_slow(timeout_seconds).error
    return Failure(f"{late}: a call without await blocks the event loop; use `await asyncio.to_thread(…)` for it")


def _failed(error: Exception) -> Failure:
    return Failure(f"{type(error).__name__}: {error}")
