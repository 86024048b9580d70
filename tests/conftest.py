"""What holds for all tests: what a machine lacks skips a test with the reason. At the end the skips are
counted, the megatron-core is named, and with --by-file each file has a line."""

import importlib.util
from collections import Counter
from importlib import metadata
from typing import Any

import pytest
from _pytest.terminal import TerminalReporter

from megappo.launcher.world import count_gpus

LACKS = {
    "gpu": lambda: None if count_gpus() else "no CUDA GPU on this machine",
    "vllm": lambda: None if importlib.util.find_spec("vllm") else "vLLM is not installed (pip install '.[vllm]')",
    "ray": lambda: None if importlib.util.find_spec("ray") else "Ray is not installed (pip install '.[ray]')",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--by-file", action="store_true", help="at the end a line for each file: results and seconds")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker, lacking in LACKS.items():
            reason = lacking() if item.get_closest_marker(marker) else None
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    if terminalreporter.config.getoption("by_file"):
        for line in by_file(terminalreporter.stats):
            terminalreporter.write_line(line)
    skipped = len(terminalreporter.stats.get("skipped", []))
    terminalreporter.write_line(f"{skipped} skipped; megatron-core {metadata.version('megatron-core')}")


def by_file(stats: dict[str, list[Any]]) -> list[str]:
    """A line for each file, those with failures last: its results, and the seconds of its tests with their fixtures."""
    results: dict[str, Counter[str]] = {}
    seconds: Counter[str] = Counter()
    for outcome, reports in stats.items():
        for report in (each for each in reports if isinstance(each, pytest.TestReport)):
            file = report.nodeid.partition("::")[0]
            seconds[file] += report.duration
            if outcome:  # of set-ups and clean-ups that went well it is empty
                results.setdefault(file, Counter())[outcome] += 1
    return [
        f"{seconds[file]:7.1f} s  {file}: " + ", ".join(f"{number} {outcome}" for outcome, number in found.items())
        for file, found in sorted(results.items(), key=lambda each: each[1]["failed"] + each[1]["error"])
    ]
