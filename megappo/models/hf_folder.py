"""Hugging Face model folders: safetensors read slice by slice and written shard by shard. Knows no model."""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megappo.config.checkpoint_names import readable
from megappo.errors import DataError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
CONFIG = "config.json"

# Everything beside weights that a folder needs to be loaded again.
_GENERATION = "generation_config.json"
_TOKENIZER = (
    "chat_template.jinja", "chat_template.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
)  # fmt: skip


class SafetensorsReader:
    """The tensors of a folder, opened file by file when first read; use it in a `with` block.

    Raises DataError where the folder has no safetensors, or its index names a file that is missing. `single` is the
    name that a file with all tensors has.
    """

    def __init__(self, folder: Path, single: str = SINGLE) -> None:
        self.folder = readable(folder)
        self._single = single
        self._open: dict[str, Any] = {}
        self._file_of = self._read_index()

    def __enter__(self) -> "SafetensorsReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.clear()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor; DataError where none does."""
        if name not in self._file_of:
            raise DataError(f"{self.folder}: tensor {name} is missing from its safetensors files; the model needs it")
        return self.folder / self._file_of[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def rows(self, name: str, axis: int, start: int, length: int) -> Tensor:
        """`length` rows (axis 0) or columns (axis 1) from `start` on; only they are read."""
        piece = self._slice(name)
        return piece[start : start + length] if axis == 0 else piece[:, start : start + length]

    def _slice(self, name: str) -> Any:
        return self._handle(self.file_of(name)).get_slice(name)

    def _handle(self, file: Path) -> Any:
        if file.name not in self._open:
            try:
                self._open[file.name] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise DataError(
                    f"{file}: not a readable safetensors file ({error}); copy it again from its source"
                ) from error
        return self._open[file.name]

    def _read_index(self) -> dict[str, str]:
        """Tensor name → file name."""
        index, single = self.folder / INDEX, self._single
        if single == SINGLE and index.is_file():
            file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
            for file in sorted(set(file_of.values())):
                if not (self.folder / file).is_file():
                    raise DataError(
                        f"{index}: names {file}, which is not in the folder; copy it from the model's source"
                    )
            return file_of
        if (self.folder / single).is_file():
            return dict.fromkeys(self._handle(self.folder / single).keys(), single)
        if single != SINGLE:
            raise DataError(f"{self.folder}: has no {single}; give a folder that PEFT has saved with safetensors")
        if list(self.folder.glob("pytorch_model*.bin")):
            raise DataError(
                f"{self.folder}: has pytorch_model.bin but no safetensors, which megappo reads; save it again: "
                "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER, safe_serialization=True)"
            )
        raise DataError(f"{self.folder}: has neither {SINGLE} nor {INDEX}; give a folder that save_pretrained wrote")


class SafetensorsWriter:
    """Collects tensors and writes a file whenever `max_shard_bytes` are full.

    Files are named after `part`, so that several ranks write into one folder; `write_index` joins them at the end.
    """

    def __init__(self, folder: Path, *, part: int, max_shard_bytes: int) -> None:
        self.folder = folder
        self.part = part
        self.max_shard_bytes = max_shard_bytes
        self.file_of: dict[str, str] = {}
        self.num_bytes = 0
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._num_files = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Takes a tensor on the CPU; it may be written at once, or by a later call."""
        assert name not in self.file_of and name not in self._pending, f"{name} is written twice"
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self.max_shard_bytes:
            self.flush()
        self._pending[name] = tensor.contiguous()
        self._pending_bytes += size

    def flush(self) -> None:
        """Writes what is pending."""
        if not self._pending:
            return
        self._num_files += 1
        file = f"model-{self.part:05d}-{self._num_files:05d}.safetensors"
        save_file(self._pending, self.folder / file, metadata={"format": "pt"})
        self.file_of |= dict.fromkeys(self._pending, file)
        self.num_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0


def write_index(folder: Path, file_of: Mapping[str, str], num_bytes: int) -> None:
    """Joins the written files: one becomes model.safetensors, several are numbered as Hugging Face numbers them."""
    files = sorted(set(file_of.values()))
    if len(files) == 1:
        (folder / files[0]).rename(folder / SINGLE)
        return
    numbered = {file: f"model-{place:05d}-of-{len(files):05d}.safetensors" for place, file in enumerate(files, start=1)}
    for file, name in numbered.items():
        (folder / file).rename(folder / name)
    index = {
        "metadata": {"total_size": num_bytes},
        "weight_map": {name: numbered[file] for name, file in sorted(file_of.items())},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def copy_companions(source: Path, destination: Path, tokenizer_folder: Path | None = None) -> None:
    """Copies config.json and what `copy_tokenizer` copies, where the source has them."""
    _copy((CONFIG,), source, destination)
    copy_tokenizer(source, destination, tokenizer_folder)


def copy_tokenizer(source: Path, destination: Path, tokenizer_folder: Path | None = None) -> None:
    """Copies the tokenizer of `source`, or of `tokenizer_folder` where it is given, into a new folder. No file of the
    two may be mixed: a chat template or added tokens of the one would be taken for the other's. The source's
    generation_config.json, which names end tokens, is copied where the tokenizer's folder has none."""
    _copy((_GENERATION,), source, destination)
    _copy((_GENERATION, *_TOKENIZER), tokenizer_folder or source, destination)


def _copy(names: Iterable[str], source: Path, destination: Path) -> None:
    source = readable(source)
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)


def dtype_name(dtype: torch.dtype) -> str:
    """As config.json writes it: torch.bfloat16 → "bfloat16"."""
    return str(dtype).removeprefix("torch.")
