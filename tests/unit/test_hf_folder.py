"""Folders whose weights don't fit their configuration are refused before training, and stages don't overwrite each
other.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megappo.errors import DataError
from megappo.models.hf_folder import SafetensorsReader, SafetensorsWriter, copy_companions, write_index


def test_slices(tmp_path: Path) -> None:
    save_file({"a": torch.arange(12.0).reshape(3, 4), "b": torch.arange(3.0)}, tmp_path / "model.safetensors")
    with SafetensorsReader(tmp_path) as reader:
        assert reader.names == {"a", "b"} and reader.shape("a") == (3, 4)
        assert reader.rows("a", 0, 1, 2).tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
        assert reader.rows("a", 1, 1, 2).tolist() == [[1, 2], [5, 6], [9, 10]]
        assert reader.rows("b", 0, 2, 1).tolist() == [2]
        with pytest.raises(DataError, match="tensor c is missing"):
            reader.shape("c")


def test_folders_without_safetensors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="neither model"):
        SafetensorsReader(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(DataError, match="save_pretrained"):
        SafetensorsReader(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 3)
    with pytest.raises(DataError, match="not a readable safetensors file"):
        SafetensorsReader(tmp_path)


def test_an_index_that_names_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    with pytest.raises(DataError, match=r"names model-00001-of-00002\.safetensors"):
        SafetensorsReader(tmp_path)


def test_two_writers_make_one_folder(tmp_path: Path) -> None:
    tensors = {name: torch.full((4,), float(place)) for place, name in enumerate("abc")}
    writers = [SafetensorsWriter(tmp_path, part=part, max_shard_bytes=16) for part in range(2)]
    writers[1].add("c", tensors["c"])
    for name in "ab":
        writers[0].add(name, tensors[name])
    for writer in writers:
        writer.flush()
    write_index(tmp_path, writers[0].file_of | writers[1].file_of, sum(writer.num_bytes for writer in writers))
    names = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert names == [f"model-0000{place}-of-00003.safetensors" for place in (1, 2, 3)]
    assert load_file(tmp_path / names[2]).keys() == {"c"}
    with SafetensorsReader(tmp_path) as reader:
        for name, tensor in tensors.items():
            assert torch.equal(reader.rows(name, 0, 0, 4), tensor)


def test_one_file_needs_no_index(tmp_path: Path) -> None:
    writer = SafetensorsWriter(tmp_path, part=0, max_shard_bytes=1000)
    writer.add("a", torch.zeros(4))
    writer.flush()
    write_index(tmp_path, writer.file_of, writer.num_bytes)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ((), {"config.json": "model", "generation_config.json": "model", "tokenizer.json": "words"}),
        (
            ("config.json", "generation_config.json", "vocab.json"),
            {
                "config.json": "model",
                "generation_config.json": "words",
                "tokenizer.json": "words",
                "vocab.json": "words",
            },
        ),
    ],
)
def test_a_tokenizer_of_another_folder(tmp_path: Path, own: tuple[str, ...], expected: dict[str, str]) -> None:
    """Its files alone, with the generation_config.json that it may have; the model's configuration always."""
    of_model = ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "added_tokens.json")
    for folder, names in (("model", of_model), ("words", ("tokenizer.json", *own)), ("out", ())):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_text(folder)
    copy_companions(tmp_path / "model", tmp_path / "out", tmp_path / "words")
    assert {file.name: file.read_text() for file in (tmp_path / "out").iterdir()} == expected
