"""What pip takes of megatron-core on which machine, what is said where Triton is missing beside it, and which one tests
run with."""

import ast
import logging
import subprocess
import sys
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from megappo.errors import UserError
from megappo.parallel import runtime, triton_needed  # noqa: F401  the filters of logs
from megappo.parallel.triton_needed import missing_triton, refuse_missing_triton
from tests.conftest import by_file
from tests.support.ranks import ROOT, rank_environment


def required(python: str, platform: str) -> dict[str, Requirement]:
    """What `pip install .` asks for there, by name."""
    [value] = [
        statement.value
        for statement in ast.parse((ROOT / "setup.py").read_text()).body
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "INSTALL_REQUIRES"
    ]
    found = [Requirement(line) for line in ast.literal_eval(value)]
    here = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": platform}
    applying = [each for each in found if each.marker is None or each.marker.evaluate(here)]
    assert len({each.name for each in applying}) == len(applying)
    return {each.name: each for each in applying}


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_megatron_comes_with_the_triton_that_it_imports(python: str, platform: str) -> None:
    """0.16.1 is the newest release for Python 3.11; 0.17 and later are for 3.12 on, 0.18 and later import Triton."""
    wanted = required(python, platform)
    releases = ["0.16.1"] if python == "3.11" else ["0.16.1", "0.17.1", "0.18.2", "0.19.2", "0.20.0"]
    taken = max(wanted["megatron-core"].specifier.filter(releases), key=Version)
    assert taken == ("0.19.2" if platform == "linux" and python != "3.11" else "0.16.1")
    assert ("triton" in wanted) == (taken == "0.19.2")
    assert missing_triton(taken, has_triton="triton" in wanted) is None


@pytest.mark.parametrize(
    ("version", "has_triton", "refused"),
    [
        ("0.16.1", False, False), ("0.17.1", False, False), ("0.18.0rc1", False, True), ("0.18.2", False, True),
        ("0.19.2", False, True), ("0.19.2+30d1110", False, True), ("0.19.2", True, False),
    ],
)  # fmt: skip
def test_a_megatron_without_its_triton_is_refused(version: str, has_triton: bool, refused: bool) -> None:
    assert (missing_triton(version, has_triton=has_triton) is not None) == refused


def test_the_refusal_says_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_needed.metadata, "version", lambda name: {"megatron-core": "0.19.2"}[name])
    monkeypatch.setattr(triton_needed.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"megatron-core 0\.19\.2 imports Triton.*pip install triton, or, .*==0\.16\.1'"
    ):
        refuse_missing_triton()


def test_a_source_tree_is_left_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise triton_needed.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(triton_needed.metadata, "version", unknown)
    refuse_missing_triton()


def test_ranks_import_the_megatron_that_is_named() -> None:
    """`make test-megatron` lays another version before the installed one: its version is told, its code is run."""
    ask = "import importlib.util; print(importlib.util.find_spec('megatron.core').origin)"
    ranks = subprocess.run(
        [sys.executable, "-c", ask], env=rank_environment(), capture_output=True, text=True, check=True
    )
    named = metadata.distribution("megatron-core").locate_file("megatron/core/__init__.py")
    assert ranks.stdout.strip() == str(named)


def test_a_run_of_many_files_ends_with_a_line_for_each() -> None:
    def report(nodeid: str, seconds: float) -> pytest.TestReport:
        return pytest.TestReport(nodeid, ("", 0, ""), {}, "passed", None, "call", duration=seconds)

    stats = {
        "failed": [report("a.py::one", 1.0)],
        "": [report("a.py::one", 0.25), report("b.py::one", 0.5)],
        "passed": [report("b.py::one", 2.0), report("b.py::two", 4.0), report("a.py::two", 8.0)],
        "warnings": [object()],
    }
    assert by_file(stats) == ["    6.5 s  b.py: 2 passed", "    9.2 s  a.py: 1 failed, 1 passed"]


def test_test_megatron_runs_every_file_once_and_those_that_differ_first() -> None:
    printed = subprocess.run(
        ["make", "--no-print-directory", "-s", "-f", "Makefile", "-f", "-", "print"],
        cwd=ROOT, input="print: ; @echo $(MEGATRON_TESTS)\n", capture_output=True, text=True, check=True,
    )  # fmt: skip
    files = printed.stdout.split()
    there = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "tests" / "distributed").glob("test_*.py"))
    assert sorted(files) == [*there, "tests/unit"]
    assert files[:2] == ["tests/distributed/test_models.py", "tests/distributed/test_moe_parity.py"]


@pytest.mark.parametrize(("message", "is_told"), [("GPTModel IS DEPRECATED. Use another.", False), ("memory", True)])
def test_logs_that_nobody_can_act_on_are_left_out(message: str, is_told: bool) -> None:
    logger = logging.getLogger("megatron.core.models.gpt.gpt_model")
    record = logger.makeRecord(logger.name, logging.WARNING, __file__, 1, message, (), None)
    assert bool(logger.filter(record)) is is_told
