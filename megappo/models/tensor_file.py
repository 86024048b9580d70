"""A safetensors file that is written tensor by tensor: its writer never holds them all."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from megappo.models.weight_map import Shape

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class TensorFile:
    """Takes the tensors of a file in any order; use it in a `with` block. What never comes is zero.

    Names, types and shapes are known from the start, for they and the places of the bytes stand before all numbers.
    Tensors of one type are in the order of their names, byte for byte as safetensors' `save_file` writes them (0.8).
    """

    def __init__(self, path: Path, tensors: Mapping[str, tuple[torch.dtype, Shape]]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offsets: dict[str, int] = {}
        end = 0
        # The widest types first, so that every number lies at a multiple of its size.
        for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: (-item[1][0].itemsize, item[0])):
            start, end = end, end + dtype.itemsize * math.prod(shape)
            header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
            offsets[name] = start
        words = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        words += b" " * (-len(words) % 8)
        self._tensors = dict(tensors)
        self._start = 8 + len(words)
        self._offsets = offsets
        self._file = path.open("wb")
        self._file.write(len(words).to_bytes(8, "little") + words)
        self._file.truncate(self._start + end)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def put(self, name: str, tensor: Tensor) -> None:
        """Writes a tensor that lies on the CPU."""
        assert (tensor.dtype, tuple(tensor.shape)) == self._tensors[name], f"{name} is another tensor than was named"
        self._file.seek(self._start + self._offsets[name])
        self._file.write(as_bytes(tensor).numpy().data)


def as_bytes(tensor: Tensor) -> Tensor:
    """[bytes] uint8 of a tensor on the CPU."""
    return tensor.contiguous().flatten().view(torch.uint8)
