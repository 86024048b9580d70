"""The frozen weights under adapters: a checkpoint names their files and does not hold them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megappo.config.checkpoint_names import readable
from megappo.errors import DataError

END_BYTES = 1 << 20
"""What is read of either end of a file: its header with all names and shapes, and weights of both ends."""


@dataclass(frozen=True)
class FrozenWeights:
    """Safetensors files of a Hugging Face folder, each known by its bytes and the CRC-32 of both of its ends."""

    folder: Path
    files: dict[str, list[int]]

    @classmethod
    def of(cls, folder: Path) -> FrozenWeights:
        files = sorted(readable(folder).glob("*.safetensors"))
        return cls(folder.resolve(), {file.name: _fingerprint(file) for file in files})

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> FrozenWeights:
        return cls(Path(content["folder"]), content["files"])

    def to_json(self) -> dict[str, Any]:
        return {"folder": str(self.folder), "files": self.files}

    def check(self, now: FrozenWeights, place: str, remedy: str) -> None:
        """DataError where `now` has other files than those which the adapters in `place` were trained on."""
        names = sorted(self.files.keys() | now.files.keys())
        differing = next((name for name in names if self.files.get(name) != now.files.get(name)), None)
        if differing is not None:
            raise DataError(
                f"{place}: its adapters were trained on the weights of {self.folder}, and those in {now.folder} are "
                f"others ({differing}); {remedy}"
            )


def _fingerprint(file: Path) -> list[int]:
    """[bytes, CRC-32 of the first and last MiB]."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        crc = zlib.crc32(stream.read(END_BYTES))
        stream.seek(max(size - END_BYTES, 0))
        return [size, zlib.crc32(stream.read(END_BYTES), crc)]
