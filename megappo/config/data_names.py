"""Names of data sets as section `data` has them: a file, a folder, `FOLDER@SPLIT`, `hub:NAME[:CONFIG][@SPLIT]`.

Reading them is in `data/sources.py`.
"""

from pathlib import Path

from megappo.errors import DataError

HUB_PREFIX = "hub:"
"""Start of a data set's name that is fetched, not read from disk."""


def source_name(spec: str) -> str:
    """Short name of a data set for metrics: the file's stem, or the hub name's last part."""
    if spec.startswith(HUB_PREFIX):
        name, _, _ = parse_hub(spec)
        return name.rsplit("/", 1)[-1]
    return Path(split_folder(spec)[0]).stem


def parse_hub(spec: str) -> tuple[str, str | None, str]:
    """`hub:NAME[:CONFIG][@SPLIT]` → (name, configuration, split); the split is `train` where none is named."""
    rest, _, split = spec.removeprefix(HUB_PREFIX).partition("@")
    name, _, config = rest.partition(":")
    if not name:
        raise DataError(f"{spec}: no data set is named; write {HUB_PREFIX}NAME[:CONFIG][@SPLIT]")
    return name, config or None, split or "train"


def split_folder(spec: str) -> tuple[str, str | None]:
    """`FOLDER@SPLIT` → (folder, split), unless a path with that very name exists."""
    if Path(spec).exists() or "@" not in spec:
        return spec, None
    folder, _, split = spec.rpartition("@")
    return folder, split
