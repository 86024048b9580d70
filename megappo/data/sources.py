"""Rows of a data set: JSONL, JSON, Parquet, folders saved by `datasets`, the hub. What they mean is in `prompts.py`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from megappo.config.data_names import HUB_PREFIX, parse_hub, split_folder
from megappo.errors import DataError


@dataclass(frozen=True)
class Row:
    """One row: its columns, its number from 0, and where it stands (`file:line`, or `file, row N`) for messages."""

    columns: Mapping[str, Any]
    index: int
    place: str

    def get(self, key: str, setting: str) -> Any:
        """The column `key`; `setting` is the YAML path that names it. Raises DataError where it is missing or null."""
        if key not in self.columns:
            raise DataError(
                f"{self.place}: no column {key!r}; the columns are {', '.join(map(repr, self.columns)) or 'none'}"
                f"{_nearest(key, self.columns, setting)}"
            )
        value = self.columns[key]
        if value is None:
            raise DataError(f"{self.place}: column {key!r} is null; remove the row or give it a value")
        return value


def read_rows(spec: str, limit: int | None = None) -> list[Row]:
    """The first `limit` rows (all where None) of a file, a folder, or `hub:NAME[:CONFIG][@SPLIT]`.

    Raises DataError with file and line where something can't be read, and where there is no row at all.
    """
    rows = list(islice(_open(spec), limit))
    if not rows:
        raise DataError(f"{spec}: no rows; a data set needs at least one")
    return rows


def _open(spec: str) -> Iterator[Row]:
    if spec.startswith(HUB_PREFIX):
        return _hub_rows(spec)
    path = Path(split_folder(spec)[0])
    if path.is_dir():
        return _folder_rows(spec)
    if not path.exists():
        raise DataError(f"{spec}: no such file or folder (looked in {Path.cwd()}){_nearest_file(path)}")
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"{spec}: can't read {path.suffix!r} files; use {', '.join(_READERS)} or a folder saved by `datasets`"
        )
    return reader(path)


def _jsonl_rows(path: Path) -> Iterator[Row]:
    index = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            columns = _parse_json(line, f"{path}:{number}")
            if not isinstance(columns, dict):
                raise DataError(
                    f"{path}:{number}: a row is a JSON object, this one is of type {type(columns).__name__}"
                )
            yield Row(columns, index, f"{path}:{number}")
            index += 1


def _json_rows(path: Path) -> Iterator[Row]:
    """A JSON array of objects; a `.json` file that starts otherwise is read as JSONL, which many are."""
    content = path.read_bytes()
    if not content.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        yield from _jsonl_rows(path)
        return
    for index, columns in enumerate(_parse_json(content, str(path))):
        if not isinstance(columns, dict):
            raise DataError(
                f"{path}, row {index}: a row is a JSON object, this one is of type {type(columns).__name__}"
            )
        yield Row(columns, index, f"{path}, row {index}")


def _parse_json(content: bytes, place: str) -> Any:
    try:
        # Some editors begin a UTF-8 file with a byte-order mark, which is no JSON.
        return json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8 text (byte {error.start}: {error.reason})") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise DataError(f"{place}: not JSON at {where}: {error.msg}") from error


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            batches = file.iter_batches(batch_size=1024)
            rows = (columns for batch in batches for columns in batch.to_pylist())
            yield from _numbered(rows, str(path))
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a readable Parquet file: {first_line(error)}") from error


_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _jsonl_rows,
    ".json": _json_rows,
    ".parquet": _parquet_rows,
}


def _folder_rows(spec: str) -> Iterator[Row]:
    """A folder of `Dataset.save_to_disk`, or `FOLDER@SPLIT` of a `DatasetDict` with several splits."""
    import datasets

    folder, split = split_folder(spec)
    try:
        loaded = datasets.load_from_disk(folder)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{folder}: no data set saved by `datasets` (save_to_disk): {first_line(error)}; name a file in it instead"
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        if split is None and len(loaded) == 1:
            split = next(iter(loaded))
        if split not in loaded:
            choices = ", ".join(f"{folder}@{name}" for name in loaded)
            raise DataError(f"{spec}: the folder holds several splits, name one: {choices}")
        loaded = loaded[split]
    yield from _numbered(iter(loaded), folder)


def _hub_rows(spec: str) -> Iterator[Row]:
    import datasets

    name, config, split = parse_hub(spec)
    try:
        loaded = datasets.load_dataset(name, config, split=split)
    # The hub's clients raise OSError (network, offline, not found) and ValueError (no such configuration or split);
    # `datasets` (5.2.0) raises RuntimeError for a set that is a script, and its own errors for files it can't read.
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{spec}: can't load it from the hub: {_reason(error)}; without a network, or where `datasets` can't read "
            "it, download it elsewhere and name a JSONL or Parquet file"
        ) from error
    yield from _numbered(iter(loaded), spec)


def _reason(error: Exception) -> str:
    """What `datasets` says of a set; of one whose files it can't read only the error's cause tells why."""
    cause = error.__cause__
    return first_line(error) + (f" ({first_line(cause)})" if isinstance(cause, ValueError) else "")


def _numbered(rows: Iterator[Mapping[str, Any]], place: str) -> Iterator[Row]:
    for index, columns in enumerate(rows):
        yield Row(columns, index, f"{place}, row {index}")


def _nearest(key: str, columns: Mapping[str, Any], setting: str) -> str:
    close = difflib.get_close_matches(key, columns, n=1, cutoff=0.5)
    return f"; set {setting}={close[0] if close else 'one of them'}" if columns else ""


def _nearest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; the folder {str(path.parent)!r} does not exist either"
    close = difflib.get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()], n=1, cutoff=0.5)
    return f"; did you mean {str(path.parent / close[0])!r}?" if close else ""


def first_line(error: BaseException) -> str:
    """What another library's error says, short enough to stand inside a message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
