"""The frozen weights under adapters: a checkpoint names their files and does not hold them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megappo.config.weight_files import weight_files
from megappo.errors import DataError


@dataclass(frozen=True)
class FrozenWeights:
    """Safetensors files of a Hugging Face folder, each as `weight_files` knows it."""

    folder: Path
    files: dict[str, list[int]]

    @classmethod
    def of(cls, folder: Path) -> FrozenWeights:
        return cls(folder.resolve(), weight_files(folder))

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
