"""Adapters of fused experts, as PEFT (0.21) saves them with transformers 5, read as those of single experts.

There a layer's experts are two parameters, `experts.gate_up_proj` [experts, 2 · ffn, hidden] and `experts.down_proj`
[experts, hidden, ffn], and an adapter of one has A [experts · rank, in], expert after expert, and B [out, rank ·
experts], with the expert as the faster number of a column. The two are told apart by their sizes: a file names what was
wrapped first `experts.base_layer`, and what was wrapped last, or alone, `experts`.
"""

import re
from pathlib import Path

import torch
from torch import Tensor

from megappo.errors import DataError
from megappo.models.hf_folder import ADAPTER_WEIGHTS, SafetensorsReader
from megappo.models.weight_map import Shape

_FUSED = re.compile(r"(.*\.layers\.\d+\.)[^.]+\.experts(?:\.base_layer)?\.lora_A\.weight")
_SINGLE = re.compile(r"(.*\.layers\.\d+\.)[^.]+\.experts\.(\d+)\.(\w+)\.lora_([AB])\.weight")
_GATE, _UP, _DOWN = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")


class AdapterReader(SafetensorsReader):
    """The tensors of a PEFT folder; those of fused experts under the names of the single ones in `expected`.

    Gate and up of an expert that share an A have it twice here: what they compute is the same. A fused adapter of twice
    `rank` has one for each, as PEFT makes it of single ones; one that was trained since mixes them, and is refused.
    Raises DataError where a fused tensor has none of these shapes.
    """

    def __init__(self, folder: Path, expected: dict[str, Shape], rank: int) -> None:
        super().__init__(folder, ADAPTER_WEIGHTS)
        self._rank = rank
        self._last: tuple[str, Tensor] = ("", torch.empty(0))
        singles = {name: found for name in expected if (found := _SINGLE.fullmatch(name)) is not None}
        self._fused: dict[str, str] = {}
        """Name of a single expert's tensor → the fused A's."""
        self._num_experts = 1 + max((int(found[2]) for found in singles.values()), default=0)
        self._rows: dict[str, tuple[int, int]] = {}  # fused A → rank of an expert's, rows of gate or down
        sizes = _sizes(expected, singles)
        for name in self._file_of:
            if (fused := _FUSED.fullmatch(name)) is None:
                continue
            kind = self._kind(name, *sizes) if sizes is not None else None
            if kind is None:
                continue  # whoever asks for the names sees one that has no place
            own = {single for single, found in singles.items() if found[1] == fused[1] and found[3] in kind}
            self._fused |= dict.fromkeys(own, name)

    @property
    def names(self) -> frozenset[str]:
        taken = {name for a in self._fused.values() for name in (a, _b(a))}
        return (super().names - taken) | self._fused.keys()

    def file_of(self, name: str) -> Path:
        return super().file_of(self._fused.get(name, name))

    def shape(self, name: str) -> Shape:
        if name not in self._fused:
            return super().shape(name)
        fused = self._fused[name]
        is_a = ".lora_A." in name
        return (self._rank, super().shape(fused)[1]) if is_a else (self._rows[fused][1], self._rank)

    def rows(self, name: str, axis: int, start: int, length: int) -> Tensor:
        if name not in self._fused:
            return super().rows(name, axis, start, length)
        return self._of_expert(name).narrow(axis, start, length)

    def _kind(self, name: str, hidden: int, ffn: int) -> tuple[str, ...] | None:
        """The projections of a fused adapter; None where it is of no experts of these sizes."""
        (rows, columns), (out, inner) = super().shape(name), super().shape(_b(name))
        rank = rows // self._num_experts
        if rows != inner or rank * self._num_experts != rows:
            return None
        if (columns, out) == (ffn, hidden):
            self._check_rank(name, rank, (self._rank,))
            self._rows[name] = rank, hidden
            return _DOWN
        if (columns, out) == (hidden, 2 * ffn):
            self._check_rank(name, rank, (self._rank, 2 * self._rank))
            self._rows[name] = rank, ffn
            return _GATE + _UP
        return None

    def _check_rank(self, name: str, rank: int, possible: tuple[int, ...]) -> None:
        if rank not in possible:
            raise DataError(
                f"{super().file_of(name)}: {name} has rank {rank} for each of {self._num_experts} experts, and rank "
                f"{self._rank} is asked for; the rank has to be theirs, or merge them with PEFT, and begin with the "
                "merged model"
            )

    def _of_expert(self, name: str) -> Tensor:
        found = _SINGLE.fullmatch(name)
        assert found is not None
        fused, expert, is_up = self._fused[name], int(found[2]), found[3] in _UP
        rank, size = self._rows[fused]
        first = self._rank if is_up and rank > self._rank else 0  # of gate's and up's own ranks
        if found[4] == "A":
            return super().rows(fused, 0, expert * rank + first, self._rank)
        rows = self._whole(_b(fused)).unflatten(1, (rank, self._num_experts))[..., expert]
        rows = rows[size : 2 * size] if is_up else rows[:size]
        if rank > self._rank:
            other = rows[:, : self._rank] if is_up else rows[:, self._rank :]
            if bool(other.any()):
                raise DataError(
                    f"{super().file_of(fused)}: {_b(fused)} mixes the adapters of gate and up, as training in the "
                    f"fused form at rank {rank} does; merge them with PEFT, and begin with the merged model"
                )
        return rows[:, first : first + self._rank]

    def _whole(self, name: str) -> Tensor:
        """A fused B, kept until another one is read: each expert has every `num_experts`-th column."""
        if self._last[0] != name:
            self._last = name, super().rows(name, 0, 0, super().shape(name)[0])
        return self._last[1]


def _sizes(expected: dict[str, Shape], singles: dict[str, re.Match[str]]) -> tuple[int, int] | None:
    """(hidden, ffn) of experts of which any projection is adapted."""
    for name, found in singles.items():
        if found[4] == "A":
            columns, rows = expected[name][1], expected[name.replace("lora_A", "lora_B")][0]
            return (rows, columns) if found[3] in _DOWN else (columns, rows)
    return None


def _b(name: str) -> str:
    return name.replace(".lora_A.", ".lora_B.")
