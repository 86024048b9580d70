"""What a command without steps says while it works: on standard error, by one rank of all."""

from __future__ import annotations

import sys
import time
from typing import TextIO

LINE_SECONDS = 30.0
"""Without a terminal, progress is a line at most this often."""


class CommandProgress:
    """Says what begins and how far it is, where `speaks`; on a terminal progress overwrites what was said before it."""

    def __init__(self, *, speaks: bool, stream: TextIO | None = None) -> None:
        self._speaks = speaks
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._phase = ""
        self._begin = self._last = time.monotonic()

    def phase(self, text: str) -> None:
        """A phase that begins; the one before it ends, and its seconds are told where it took any."""
        seconds = time.monotonic() - self._begin
        if self._phase and seconds >= 1:
            self._line(f"{self._phase}: {seconds:.0f} s")
        self._phase = text
        self._begin = self._last = time.monotonic()
        self._line(f"{text} …")

    def progress(self, done: int, total: int) -> None:
        """How much of the phase is done."""
        text = f"{self._phase}: {done}/{total}"
        if self._is_terminal and self._speaks and done < total:
            print("\r\x1b[K" + text, end="", file=self._stream, flush=True)
        elif time.monotonic() - self._last >= LINE_SECONDS:
            self._last = time.monotonic()
            self._line(text)

    def end(self) -> None:
        """Leaves no half line on a terminal."""
        if self._is_terminal and self._speaks:
            print("\r\x1b[K", end="", file=self._stream, flush=True)

    def _line(self, text: str) -> None:
        if self._speaks:
            clear = "\r\x1b[K" if self._is_terminal else ""
            print(clear + text, file=self._stream, flush=True)
