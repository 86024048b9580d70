"""tools/cores.py: the fastest of the cores that a process may use."""

import os

import pytest

from tests.support.tools import load_tool

cores = load_tool("cores")


def test_the_fastest_come_first_and_nothing_else_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {0, 1, 2, 7}
    asked: list[list[int]] = []

    def bind(_: int, to: object) -> None:
        now.clear()
        now.update(to)  # type: ignore[call-overload]
        asked.append(sorted(now))

    speeds = {0: 3.0, 1: 1.0, 2: 2.5, 7: 2.0}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(now))
    monkeypatch.setattr(os, "sched_setaffinity", bind)
    monkeypatch.setattr(cores, "loop_seconds", lambda: speeds[min(now)])
    assert cores.times() == speeds
    assert asked == [[0], [1], [2], [7], [0, 1, 2, 7]]  # where it may run afterwards is as before
    assert cores.fastest(4) == [1, 7, 2, 0] and cores.fastest(1) == [1]
    assert cores.keep_to_fastest(2) == [1, 7] and now == {1, 7}


@pytest.mark.parametrize("count", [0, 10_000])
def test_more_cores_than_there_are(count: int) -> None:
    allowed = len(os.sched_getaffinity(0))
    with pytest.raises(ValueError, match=f"{count} cores asked for, and there are {allowed}"):
        cores.fastest(count)


def test_a_core_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    allowed = os.sched_getaffinity(0)
    assert cores.main(["1"]) == 0
    assert int(capsys.readouterr().out) in allowed and os.sched_getaffinity(0) == allowed
