"""What one rank of the generation layout takes from another: the pieces that a plan is made of.

Which there are, `plan.py` says; `execute.py` carries them out. Imports neither torch nor megatron.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from megappo.engines.hybrid.kinds import with_numbers
from megappo.models.weight_map import WeightClass


class Way(Enum):
    """How rows come to a generation parameter."""

    ALIAS = "alias"
    """They are the training shard's own memory; nothing moves."""
    LOCAL = "local"
    """This rank holds them in another order: copied on the device."""
    GATHER = "gather"
    """Another rank sends them."""


@dataclass(frozen=True, slots=True)
class ExpertRun:
    """`count` experts that follow each other on both sides: numbers in the layer from `first` on, and places
    in the first dimensions of source and target."""

    first: int
    count: int
    source_place: int
    target_place: int


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines `start` … `stop - 1` of the matrices of experts `first` … `last - 1` of a transfer, counted from 0 on both;
    what has no experts counts as one."""

    first: int
    last: int
    start: int
    stop: int


def num_lines(axis: int, length: int, width: int | None) -> int:
    """Indices of the first dimension of a matrix of which `length` rows (columns for `axis` 1) travel."""
    return length if axis == 0 or width is None else width


@dataclass(frozen=True, slots=True)
class Transfer:
    """Rows of one training parameter that become rows of one generation parameter.

    `source` and `target` are parameter names with `{layer}` for `layer`. Offsets and `length` count rows along `axis`
    (of each of the experts), `width` is the other dimension (None: a vector). It travels in `buckets`, in parts of
    equal numbers of lines.
    """

    way: Way
    source_rank: int
    target_rank: int
    source: str
    target: str
    layer: int | None
    axis: int
    source_offset: int
    target_offset: int
    length: int
    width: int | None
    experts: ExpertRun | None
    num_elements: int
    element_bytes: int
    weight_class: WeightClass
    buckets: range

    @property
    def nbytes(self) -> int:
        return self.num_elements * self.element_bytes

    @property
    def lines(self) -> int:
        """Indices of the first dimension of a matrix (of each expert's, one after the other)."""
        return num_lines(self.axis, self.length, self.width) * (1 if self.experts is None else self.experts.count)

    def blocks(self, index: int) -> Iterator["Lines"]:
        """The lines that travel in the bucket at place `index` of `buckets`, cut where an expert ends."""
        count, per_expert = len(self.buckets), num_lines(self.axis, self.length, self.width)
        start, stop = self.lines * index // count, self.lines * (index + 1) // count
        while start < stop:
            expert, row = divmod(start, per_expert)
            whole = (stop - start) // per_expert if row == 0 else 0
            end = start + whole * per_expert if whole else min(stop, (expert + 1) * per_expert)
            yield Lines(expert, expert + max(1, whole), row, per_expert if whole else row + end - start)
            start = end

    @property
    def source_name(self) -> str:
        """Global Megatron name, the first of the rule's."""
        return with_numbers(self.source, self.layer)

    @property
    def target_name(self) -> str:
        """The engine's name of the parameter."""
        return with_numbers(self.target, self.layer)

    @property
    def key(self) -> tuple[str, int | None]:
        """What tells the parameter from others, without making its name."""
        return self.target, self.layer
