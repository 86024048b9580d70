"""Rows from every kind of source, and what is said of those that can't be read."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megappo.config.data_names import source_name
from megappo.data.sources import read_rows
from megappo.errors import DataError

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}, {"prompt": "3+3=", "answer": "6"}]
GSM8K = Path(__file__).resolve().parents[3] / "shared" / "data" / "gsm8k" / "test.jsonl"


def write_jsonl(path: Path, rows: list[dict[str, str]] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_json(path: Path) -> Path:
    path.write_text(json.dumps(ROWS, indent=2))
    return path


def write_parquet(path: Path) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    return path


def write_folder(path: Path) -> Path:
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(str(path))
    return path


def write_splits(path: Path) -> Path:
    import datasets

    splits = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[2:])}
    datasets.DatasetDict(splits).save_to_disk(str(path))
    return path


WRITERS = [
    (write_jsonl, "a.jsonl", "{path}:2"),
    (write_jsonl, "a.json", "{path}:2"),
    (write_json, "a.json", "{path}, row 1"),
    (write_parquet, "a.parquet", "{path}, row 1"),
    (write_folder, "folder", "{path}, row 1"),
]


@pytest.mark.parametrize(("write", "name", "place"), WRITERS)
def test_every_format_gives_the_same_rows(tmp_path: Path, write: Callable[[Path], Path], name: str, place: str) -> None:
    path = write(tmp_path / name)
    rows = read_rows(str(path))
    assert [dict(row.columns) for row in rows] == ROWS
    assert [row.index for row in rows] == [0, 1, 2]
    assert rows[1].place == place.format(path=path)
    assert [row.columns["answer"] for row in read_rows(str(path), limit=2)] == ["2", "4"]


def test_splits_of_a_folder_are_named(tmp_path: Path) -> None:
    folder = str(write_splits(tmp_path / "both"))
    assert [row.columns["answer"] for row in read_rows(f"{folder}@test")] == ["6"]
    for spec in (folder, f"{folder}@dev"):
        with pytest.raises(DataError, match=f"several splits, name one: {folder}@train, {folder}@test"):
            read_rows(spec)


def test_blank_lines_and_a_byte_order_mark_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n  \n{"a": 2}')
    assert [(row.columns["a"], row.index, row.place) for row in read_rows(str(path))] == [
        (1, 0, f"{path}:1"),
        (2, 1, f"{path}:4"),
    ]


# (content, what the message says after the file's path)
BROKEN_JSONL = [
    (b'{"a": 1}\n{"a": 2\n', ":2: not JSON at "),
    (b'{"a": 1}\n[1, 2]\n', ":2: a row is a JSON object, this one is of type list"),
    (b'{"a": 1}\n{"a": "\xff"}\n', ":2: not UTF-8 text (byte 7"),
    (b"", ": no rows; a data set needs at least one"),
    (b"\n\n", ": no rows; a data set needs at least one"),
]


@pytest.mark.parametrize(("content", "message"), BROKEN_JSONL)
def test_broken_jsonl_is_named_with_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        read_rows(str(path))
    assert f"{path}{message}" in str(error.value)


def test_other_files_that_cannot_be_read(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl")
    with pytest.raises(DataError, match=r"no such file or folder .*; did you mean '.*train.jsonl'"):
        read_rows(str(tmp_path / "trian.jsonl"))
    with pytest.raises(DataError, match=r"the folder '.*nowhere' does not exist either"):
        read_rows(str(tmp_path / "nowhere" / "train.jsonl"))
    (tmp_path / "a.csv").write_text("a,b\n")
    with pytest.raises(DataError, match=r"can't read '.csv' files; use .jsonl, .json, .parquet or a folder saved by"):
        read_rows(str(tmp_path / "a.csv"))
    (tmp_path / "a.parquet").write_text("no parquet")
    with pytest.raises(DataError, match=r"a.parquet: not a readable Parquet file"):
        read_rows(str(tmp_path / "a.parquet"))
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(DataError, match=r"a.json, row 0: a row is a JSON object, this one is of type int"):
        read_rows(str(tmp_path / "a.json"))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(DataError, match="nothing: no data set saved by `datasets`"):
        read_rows(str(tmp_path / "nothing"))


def test_a_missing_column_is_named_with_what_is_there(tmp_path: Path) -> None:
    row = read_rows(str(write_jsonl(tmp_path / "a.jsonl")))[1]
    assert row.get("prompt", "data.prompt_key") == "2+2="
    with pytest.raises(DataError) as error:
        row.get("promt", "data.prompt_key")
    assert str(error.value) == (
        f"{tmp_path}/a.jsonl:2: no column 'promt'; the columns are 'prompt', 'answer'; set data.prompt_key=prompt"
    )


def test_a_null_is_no_value(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"answer": null}\n')
    with pytest.raises(DataError, match=r"a.jsonl:1: column 'answer' is null"):
        read_rows(str(tmp_path / "a.jsonl"))[0].get("answer", "data.answer_key")


def test_the_hub_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        DataError, match=r"hub:no/such-set:main@test: can't load it from the hub: .*; without a network"
    ):
        read_rows("hub:no/such-set:main@test")
    with pytest.raises(DataError, match="no data set is named"):
        read_rows("hub:")


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("sums.py", "import datasets\n", r"Dataset scripts are no longer supported, but found sums\.py"),
        (
            "train.jsonl",
            '{"a": 1}\n{"a": \n',
            r"An error occurred while generating the dataset \(JSON parse error: .*\)",
        ),
    ],
)
def test_a_set_of_the_hub_that_cannot_be_read(
    file: str, content: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder stands for the copy of a set: `datasets` reads both alike."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "sums"
    folder.mkdir()
    (folder / file).write_text(content)
    with pytest.raises(DataError, match=rf"hub:{folder}: can't load it from the hub: {reason}; .* name a JSONL or"):
        read_rows(f"hub:{folder}")


@pytest.mark.parametrize(
    ("spec", "split", "config"),
    [("hub:openai/gsm8k", "train", None), ("hub:openai/gsm8k:main@test", "test", "main"), ("hub:a@dev", "dev", None)],
)
def test_the_hub_is_asked_for_the_right_thing(
    monkeypatch: pytest.MonkeyPatch, spec: str, split: str, config: str | None
) -> None:
    import datasets

    asked = []

    def load_dataset(name: str, config: str | None, split: str) -> list[dict[str, str]]:
        asked.append((name, config, split))
        return ROWS

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows = read_rows(spec, limit=2)
    assert asked == [(source_name(spec) if spec == "hub:a@dev" else "openai/gsm8k", config, split)]
    assert [row.place for row in rows] == [f"{spec}, row 0", f"{spec}, row 1"]


@pytest.mark.parametrize(
    ("spec", "name"),
    [("data/train.jsonl", "train"), ("hub:openai/gsm8k:main@test", "gsm8k"), ("saved/sums", "sums"), ("s/x@test", "x")],
)
def test_names_of_data_sets(spec: str, name: str) -> None:
    assert source_name(spec) == name


@pytest.mark.skipif(not GSM8K.exists(), reason="needs the GSM8K files beside the checkout")
def test_gsm8k() -> None:
    rows = read_rows(str(GSM8K))
    assert len(rows) == 1319
    assert all(set(row.columns) == {"question", "answer"} and "####" in row.columns["answer"] for row in rows)
