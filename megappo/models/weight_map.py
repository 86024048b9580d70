"""The weight map: which rows of which Hugging Face tensors make each Megatron parameter. Imports no torch.

A parameter is a list of blocks along one axis, a block a list of segments. With TP, every block is cut into equal parts
and rank r holds the r-th part of each block, block after block. That one rule covers fused QKV (one block of q, k, v
rows a KV group, cut wherever a rank's share ends, also inside a head), gate and up (two blocks), row-parallel columns
(axis 1), the padded vocabulary (a block that ends in a segment without a source) and replicated parameters (no axis).
The experts of a layer are one rule, made for one expert: `{expert}` stands for its number in names and sources.
Import, export and resharding read these lists; none of them knows a layer's arithmetic.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import lcm
from typing import Literal

Shape = tuple[int, ...]

Head = Literal["lm", "value"]
"""The layer on top of the decoder: vocabulary logits, or one number a token."""

WeightClass = Literal["dense", "experts", "vocabulary", "replicated"]
"""Cut over the TP ranks; over the EP (and expert TP) ranks; over the TP ranks with padding; whole on every rank."""

EXPERT = "{expert}"
"""Stands for an expert's number in its layer, in names and sources of rules."""


@dataclass(frozen=True)
class Segment:
    """`length` rows (or columns) of the tensor `source`, from `start` on; `source` None is that much zero padding."""

    source: str | None
    start: int
    length: int

    def part(self, start: int, stop: int) -> "Segment":
        """Rows `start` … `stop - 1` of this segment."""
        return Segment(self.source, self.start + start if self.source else 0, stop - start)


Block = tuple[Segment, ...]


@dataclass(frozen=True)
class Rule:
    """How one Megatron parameter is made.

    `names`: its global names, of which a model has one (Transformer Engine fuses a norm into the linear layer after it,
    and renames its weight). Layer numbers in them count over the whole model. `axis`: the axis of the segments, None
    for a parameter that every TP rank holds whole. `blocks`: the whole parameter, in order. `is_vocabulary`: its one
    block is padded to `padded_vocab_size`. `experts`: how many experts the rule is for; axis and blocks are those of
    one expert's matrix, `{expert}` in names and sources is its number in the layer, and a name without it is one
    parameter of all local experts, [experts / ep, rows, columns]. `is_copy`: another rule owns the same tensors (the
    output layer of a tied model's last stage), so that an export leaves this one out. `is_optional`: a folder may lack
    the tensors, the parameter then stays as built. `is_float32`: it has this type in models of any type.
    """

    names: tuple[str, ...]
    axis: int | None
    blocks: tuple[Block, ...]
    is_vocabulary: bool = False
    experts: int | None = None
    is_copy: bool = False
    is_optional: bool = False
    is_float32: bool = False

    def shard(self, tp: int, tp_rank: int) -> tuple[Segment, ...]:
        """The shard of rank `tp_rank` of `tp`, in order along `axis`; rows that continue each other are one segment."""
        if self.axis is None:
            return tuple(segment for block in self.blocks for segment in block)
        pieces: list[Segment] = []
        for block in self.blocks:
            size = sum(segment.length for segment in block)
            if self.is_vocabulary:
                padding = padded_vocab_size(size, tp) - size
                block, size = (*block, Segment(None, 0, padding)), size + padding
            assert size % tp == 0, f"{size} rows of {self.names[0]} do not divide over {tp} TP ranks"
            share = size // tp
            pieces += cut(block, tp_rank * share, (tp_rank + 1) * share)
        return tuple(_joined(pieces))

    @property
    def weight_class(self) -> "WeightClass":
        """What the parameter is cut over: this names the term of the byte formulas that it belongs to."""
        if self.experts is not None:
            return "experts"
        if self.is_vocabulary:
            return "vocabulary"
        return "dense" if self.axis is not None else "replicated"

    def of_expert(self, expert: int) -> "Rule":
        """The rule of one expert of the layer, a matrix of its own with its number in names and sources.

        A name without `{expert}` becomes that of the expert's view into the parameter that holds all local ones.
        """
        assert self.experts is not None and expert < self.experts, f"{self.names[0]} has no expert {expert}"
        blocks = tuple(
            tuple(replace(segment, source=_numbered(segment.source, expert)) for segment in block)
            for block in self.blocks
        )
        names = tuple(_numbered(name, expert) or name for name in self.names)
        return replace(self, names=names, blocks=blocks)

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the Hugging Face tensors, each once, in order of first use."""
        names = (segment.source for block in self.blocks for segment in block)
        return tuple(dict.fromkeys(name for name in names if name is not None))


def _numbered(name: str | None, expert: int) -> str | None:
    return None if name is None else name.replace(EXPERT, str(expert))


@dataclass(frozen=True)
class WeightMap:
    """All parameters of a model. `tensors`: the Hugging Face tensors with their shapes, in the order of an export."""

    tensors: Mapping[str, Shape]
    rules: tuple[Rule, ...]

    def by_parameter(self) -> dict[str, Rule]:
        """Global Megatron name → its rule, all alternative names included."""
        return {name: rule for rule in self.rules for name in rule.names}


def cut(block: Block, start: int, stop: int) -> Iterator[Segment]:
    """The segments of rows `start` … `stop - 1` of a block."""
    offset = 0
    for segment in block:
        low, high = max(start - offset, 0), min(stop - offset, segment.length)
        if low < high:
            yield segment.part(low, high)
        offset += segment.length


def _joined(segments: Iterable[Segment]) -> Iterator[Segment]:
    """Merges neighbours that continue each other, so that they are read and copied at once."""
    current: Segment | None = None
    for segment in segments:
        if (
            current is not None
            and current.source == segment.source
            and (segment.source is None or segment.start == current.start + current.length)
        ):
            current = Segment(current.source, current.start, current.length + segment.length)
            continue
        if current is not None:
            yield current
        current = segment
    if current is not None:
        yield current


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """The vocabulary with padding, in tokens: a multiple of 64 and of `tp`.

    64 is what vLLM pads to, and makes the size the same for all the usual `tp`, so that layouts exchange checkpoints.
    """
    multiple = lcm(64, tp)
    return -(-vocab_size // multiple) * multiple
