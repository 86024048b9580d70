"""What commands say while they work: on a terminal and without one, and by one rank alone."""

import io

import pytest

from megappo.observe import command_progress
from megappo.observe.command_progress import CommandProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in its only element."""
    now = [0.0]
    monkeypatch.setattr(command_progress.time, "monotonic", lambda: now[0])
    return now


def work(shown: CommandProgress, clock: list[float]) -> None:
    """2.6 seconds of reading, then five answers in a minute."""
    shown.phase("reading")
    clock[0] += 2.6
    shown.phase("generating")
    for done in range(1, 6):
        clock[0] += 12
        shown.progress(done, 5)
    shown.end()


def test_lines_without_a_terminal_are_few(clock: list[float]) -> None:
    stream = io.StringIO()
    work(CommandProgress(speaks=True, stream=stream), clock)
    assert stream.getvalue() == "reading …\nreading: 3 s\ngenerating …\ngenerating: 3/5\n"


def test_progress_is_overwritten_on_a_terminal_and_leaves_nothing(clock: list[float]) -> None:
    stream = Terminal()
    work(CommandProgress(speaks=True, stream=stream), clock)
    shown = stream.getvalue().split("\r\x1b[K")
    assert shown[4:8] == ["generating: 1/5", "generating: 2/5", "generating: 3/5", "generating: 4/5"]
    assert shown[-1] == ""


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_other_ranks_say_nothing(clock: list[float], stream: io.StringIO) -> None:
    work(CommandProgress(speaks=False, stream=stream), clock)
    assert stream.getvalue() == ""
