"""What holds for all tests: what a machine lacks skips a test with the reason, and the skips are counted at the end."""

import importlib.util

import pytest
from _pytest.terminal import TerminalReporter

from megappo.launcher.world import count_gpus

LACKS = {
    "gpu": lambda: None if count_gpus() else "no CUDA GPU on this machine",
    "vllm": lambda: None if importlib.util.find_spec("vllm") else "vLLM is not installed (pip install '.[vllm]')",
    "ray": lambda: None if importlib.util.find_spec("ray") else "Ray is not installed (pip install '.[ray]')",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker, lacking in LACKS.items():
            reason = lacking() if item.get_closest_marker(marker) else None
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    terminalreporter.write_line(f"{len(terminalreporter.stats.get('skipped', []))} skipped")
