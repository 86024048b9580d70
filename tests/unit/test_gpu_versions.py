"""The stack of GPUs: requirements/constraints-gpu.txt, and what Makefile, Dockerfile, setup.py and pages say of it."""

import ast
import re
import subprocess

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.ranks import ROOT

CONSTRAINTS = ROOT / "requirements" / "constraints-gpu.txt"
LINE = re.compile(r"([A-Za-z0-9._-]+)==([0-9][A-Za-z0-9.]*)")
MEASURED = {
    "torch": "2.11.0", "vllm": "0.20.2", "megatron-core": "0.19.2", "transformer-engine": "2.12.0",
    "transformers": "5.17.0",
}  # fmt: skip
MAKE = ["GPU_PYTHON=/of/3.12/python", "CUDA_HOME=/of/cuda", "setup-gpu", "GPU_VENV=/nowhere/venv"]


def pinned() -> dict[str, str]:
    """Version by name in pip's spelling; every line but comments is an exact version, and no name comes twice."""
    lines = [line for line in CONSTRAINTS.read_text().splitlines() if line and not line.startswith("#")]
    found = {canonicalize_name(match[1]): match[2] for line in lines if (match := LINE.fullmatch(line))}
    assert len(found) == len(lines)
    return found


def commands(*words: str) -> str:
    return subprocess.run(
        ["make", "--dry-run", "--no-print-directory", *MAKE, *words], cwd=ROOT, capture_output=True, text=True,
        check=True,
    ).stdout  # fmt: skip


def installed(text: str) -> set[str]:
    """The names that `pip install` is given, without options; the project itself is `.` or `/opt/megappo`."""
    found = set()
    for call in re.findall(r"pip(?: --[a-z-]+)* install ([^\n&]*)", text.replace("\\\n", " ")):
        words = re.sub(r"--(?:constraint|config-settings) \S+|\$\{.*?\}", "", call).split()
        found |= {re.sub(r"[\"']|\[.*", "", word) for word in words if not word.startswith("--")}
    return found


def test_what_ran_together_is_pinned() -> None:
    versions = pinned()
    assert {name: versions[name] for name in MEASURED} == MEASURED
    assert versions["transformer-engine-torch"] == versions["transformer-engine-cu13"] == MEASURED["transformer-engine"]


def test_the_ranges_of_setup_take_the_pinned_versions() -> None:
    """With its extras for vLLM, Transformer Engine and developers; none of them is left for pip to choose."""
    versions, wanted = pinned(), []
    for statement in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) in (
            "INSTALL_REQUIRES", "EXTRAS_REQUIRE",
        ):  # fmt: skip
            value = ast.literal_eval(statement.value)
            wanted += value if isinstance(value, list) else [*value["vllm"], *value["te"], *value["dev"]]
    here = {"python_version": "3.12", "python_full_version": "3.12.3", "sys_platform": "linux"}
    requirements = [each for each in map(Requirement, wanted) if each.marker is None or each.marker.evaluate(here)]
    assert len(requirements) > 20
    wrong = [str(each) for each in requirements if versions.get(canonicalize_name(each.name)) not in each.specifier]
    assert not wrong


def test_make_and_the_image_install_pinned_names() -> None:
    made, image = commands("TE=1"), (ROOT / "Dockerfile").read_text()
    tools, package = {"setuptools", "wheel", "packaging", "pybind11"}, "/opt/megappo"
    assert installed(made) == {"torch", ".", "transformer-engine", *tools}
    in_image = {"torch", "vllm", "megatron-core", package, "transformer-engine", "/tmp/apex"}
    assert installed(image) == in_image | tools
    assert installed(made) | installed(image) <= pinned().keys() | {".", package, "/tmp/apex"}
    # Versions are in that file alone.
    assert "==" not in made and "==" not in image
    assert made.count(" install --constraint requirements/constraints-gpu.txt ") == made.count("pip ") == 4
    assert "'.[dev,vllm]'" in made and '"/opt/megappo[vllm]"' in image
    assert image.index("PIP_CONSTRAINT=/opt/constraints-gpu.txt") < image.index("pip install")
    assert "!requirements" in (ROOT / ".dockerignore").read_text().splitlines()


def test_transformer_engine_is_a_step_of_its_own() -> None:
    """With the same settings in both places, and only where asked."""
    without, with_it = commands(), commands("TE=1", "MAX_JOBS=3")
    assert "transformer-engine" not in without and with_it.startswith(without.rpartition("\n:")[0])
    image = (ROOT / "Dockerfile").read_text()
    assert "NVTE_FRAMEWORK=pytorch MAX_JOBS=3" in with_it and "CUDA_HOME=/of/cuda" in with_it
    for setting in ("CPLUS_INCLUDE_PATH=", "site-packages/nvidia/*/include", "NVTE_FRAMEWORK=pytorch", "CUDA_HOME="):
        assert setting in with_it and setting in image
    for text in (with_it, image):
        assert re.search(r"--no-build-isolation ['\"]transformer-engine\[core-cu13,pytorch\]['\"]", text)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("GPU_PYTHON=", "no Python 3.12 found; name one: make setup-gpu GPU_PYTHON="),
        ("GPU_PYTHON=/bin/false", "making .*venv with /bin/false"),
    ],
)
def test_a_machine_without_its_python_is_told(tmp_path_factory: pytest.TempPathFactory, given: str, told: str) -> None:
    venv = tmp_path_factory.mktemp("made") / "venv"
    command = ["make", "--no-print-directory", "setup-gpu", f"GPU_VENV={venv}", given]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode != 0 and re.search(told, ended.stdout + ended.stderr) and not venv.exists()


def test_clean_takes_it_away_and_git_does_not_see_it() -> None:
    printed = subprocess.run(
        ["make", "--dry-run", "clean"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    assert ".venv-gpu" in printed and ".venv-gpu/" in (ROOT / ".gitignore").read_text().splitlines()


def test_pages_name_the_same_versions() -> None:
    """`vLLM 0.20.2` and the like beside `make setup-gpu`; a page may write 2.11 for 2.11.0."""
    names = {
        "torch": "torch", "vLLM": "vllm", "megatron-core": "megatron-core", "transformers": "transformers",
        "Transformer Engine": "transformer-engine",
    }  # fmt: skip
    told: set[str] = set()
    for page in (ROOT / "README.md", ROOT / "docs" / "vllm.md"):
        text = page.read_text(encoding="utf-8")
        [about] = [each for each in re.split(r"\n(?=#+ )", text) if "make setup-gpu" in each]
        paragraphs = [each for each in about.split("\n\n") if "setup-gpu" in each]
        for shown, version in re.findall(rf"({'|'.join(names)})[\s]+(\d[\d.]*\d)", "\n".join(paragraphs)):
            assert (pinned()[names[shown]] + ".").startswith(version + "."), f"{page.name}: {shown} {version}"
            told.add(shown)
    assert told == set(names)
