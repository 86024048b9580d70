"""The event loop of async environments, in a thread of its own. Who waits for an answer keeps the time limit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

GRACE_SECONDS = 0.2
"""Within which a loop that isn't blocked says so, after answers came too late."""
MAX_THREADS = 32
"""Blocking calls that one `DaemonThreads` makes at once."""


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What coroutines gave, in their order: None where the limit came first. `is_blocked`: the loop stood still."""

    results: list[T | None]
    is_blocked: bool


class EnvironmentLoop:
    """One event loop for all coroutines: connections and semaphores that environments keep are bound to theirs.

    Only a loop that a call blocks beyond the limit, and still blocks when the next coroutines come, is left behind
    for a fresh one.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._awake = threading.Event()

    def run(self, coroutines: Sequence[Coroutine[Any, Any, T]], timeout_seconds: float) -> Outcome[T]:
        """Runs them together; returns within the limit, whatever they do. They may raise nothing."""
        loop = self._usable()
        futures = [asyncio.run_coroutine_threadsafe(one, loop) for one in coroutines]
        _, late = wait(futures, timeout_seconds)
        for future in late:
            future.cancel()
        is_blocked = False
        if late:
            self._awake = threading.Event()
            loop.call_soon_threadsafe(self._awake.set)
            # Threads that hang would keep their places for ever.
            loop.call_soon_threadsafe(loop.set_default_executor, DaemonThreads())
            is_blocked = not self._awake.wait(GRACE_SECONDS)
        return Outcome([None if future.cancelled() else future.result() for future in futures], is_blocked)

    def _usable(self) -> asyncio.AbstractEventLoop:
        # A process that was forked from another has the loop, but not its thread.
        if self._loop is not None and self._thread is not None and self._thread.is_alive():
            if self._awake.is_set():
                return self._loop
            # A second for what was cancelled to end, once the call that blocks it returns.
            self._loop.call_soon_threadsafe(self._loop.call_later, 1.0, self._loop.stop)
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(DaemonThreads())
        self._awake.set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="environments", daemon=True)
        self._thread.start()
        return self._loop


class DaemonThreads(ThreadPoolExecutor):
    """A thread a call, which nobody waits for: Python joins those of a plain pool when a process exits."""

    def __init__(self) -> None:
        super().__init__(MAX_THREADS)
        self._places = threading.Semaphore(MAX_THREADS)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Calls `fn` as soon as one of the places is free; one that was cancelled before is not called."""
        future: Future[T] = Future()

        def call() -> None:
            while not self._places.acquire(timeout=1.0):
                if future.cancelled():
                    return
            try:
                if future.set_running_or_notify_cancel():
                    future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001  it is raised where the result is awaited
                future.set_exception(error)
            finally:
                self._places.release()

        threading.Thread(target=call, daemon=True).start()
        return future
