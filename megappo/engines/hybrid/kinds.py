"""A weight map as a few kinds of parameters, each with the layers that have it: layers repeat, so plans need not.

Also where the rows of a Hugging Face tensor lie in training shards. Imports no torch.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from megappo.models.weight_map import EXPERT, Block, Rule, Segment, Shape, WeightMap, cut, padded_vocab_size

LAYER = "{layer}"
FLOAT32_BYTES = 4
_LAYER_NUMBER = re.compile(r"\.layers\.(\d+)\.")


def without_layer(name: str) -> tuple[str, int | None]:
    """The name with `{layer}` for its layer's number, and that number."""
    match = _LAYER_NUMBER.search(name)
    if match is None:
        return name, None
    return _LAYER_NUMBER.sub(f".layers.{LAYER}.", name, count=1), int(match[1])


def with_numbers(name: str, layer: int | None, expert: int | None = None) -> str:
    """The inverse of `without_layer`, also for an expert's number."""
    if layer is not None:
        name = name.replace(LAYER, str(layer))
    return name if expert is None else name.replace(EXPERT, str(expert))


@dataclass(frozen=True)
class Kind:
    """Parameters of many layers that are made alike: `rule` has `{layer}` in its names.

    `layers` are their numbers, (None,) for a parameter outside of the layers. `width`: elements of one row or column of
    an (expert's) matrix; None for a vector.
    """

    rule: Rule
    layers: tuple[int | None, ...]
    width: int | None

    @property
    def name(self) -> str:
        return self.rule.names[0]

    @property
    def key(self) -> tuple[str, int | None]:
        """What tells it from other kinds: layers that are made differently share names."""
        return self.name, self.layers[0]

    @property
    def axis(self) -> int:
        return self.rule.axis or 0

    def element_bytes(self, of_model: int) -> int:
        """Bytes of an element, in a model whose other elements have `of_model`."""
        return FLOAT32_BYTES if self.rule.is_float32 else of_model

    def length(self, tp: int) -> int:
        """Rows (or columns) of the whole (expert's) matrix, the padding for `tp` ranks included."""
        return sum(sum(segment.length for segment in block) for block in padded_blocks(self.rule, tp))

    def num_elements(self, tp: int) -> int:
        """Elements of one layer's parameter: all experts, all rows, the padding for `tp` ranks included."""
        return self.length(tp) * (self.width or 1) * (self.rule.experts or 1)


@dataclass(frozen=True)
class Run:
    """`length` rows of a tensor in training: in the shard number `shard`, from row `offset` of the shard on.

    `shard` is the tensor-parallel rank (for experts: the expert-tensor-parallel rank), None where each rank holds all.
    """

    kind: Kind
    shard: int | None
    offset: int
    length: int


@dataclass(frozen=True)
class Kinds:
    """All kinds of a model in the order of its map, copies of tied tensors left out."""

    kinds: tuple[Kind, ...]
    tied: frozenset[str]
    """Names of kinds whose tensors the last pipeline stage holds a second time."""

    @classmethod
    def of(cls, weight_map: WeightMap) -> "Kinds":
        """Layers whose rules differ in nothing but their number become one kind."""
        rules: dict[tuple[object, ...], tuple[Rule, list[int | None]]] = {}
        copied: set[str] = set()
        for rule in weight_map.rules:
            if rule.is_copy:
                copied |= set(rule.sources)
                continue
            normal, layer = _normal(rule)
            key = (normal.names, normal.axis, normal.blocks, normal.experts)
            rules.setdefault(key, (normal, []))[1].append(layer)
        shapes = {without_layer(name)[0]: shape for name, shape in weight_map.tensors.items()}
        kinds = tuple(Kind(rule, tuple(layers), _width(rule, shapes)) for rule, layers in rules.values())
        tied = frozenset(kind.name for kind in kinds if copied.intersection(kind.rule.sources))
        return cls(kinds, tied)

    @cached_property
    def of_source(self) -> Mapping[tuple[str, int | None], Kind]:
        """(Hugging Face name with `{layer}`, layer) → the kind that holds its rows."""
        return {(source, layer): kind for kind in self.kinds for source in kind.rule.sources for layer in kind.layers}


def _normal(rule: Rule) -> tuple[Rule, int | None]:
    names = [without_layer(name) for name in rule.names]
    layer = names[0][1]
    blocks = tuple(
        tuple(
            Segment(None if each.source is None else without_layer(each.source)[0], each.start, each.length)
            for each in block
        )
        for block in rule.blocks
    )
    normal = Rule(
        names=tuple(name for name, _ in names),
        axis=rule.axis,
        blocks=blocks,
        is_vocabulary=rule.is_vocabulary,
        experts=rule.experts,
        is_optional=rule.is_optional,
        is_float32=rule.is_float32,
    )
    return normal, layer


def _width(rule: Rule, shapes: Mapping[str, Shape]) -> int | None:
    """Elements of a row along the rule's axis, from the shape of its first tensor (expert 0's for experts)."""
    shape = shapes[rule.sources[0].replace(EXPERT, "0")]
    return None if len(shape) == 1 else prod(shape) // shape[rule.axis or 0]


def padded_blocks(rule: Rule, tp: int) -> tuple[Block, ...]:
    """The rule's blocks; the padding of a vocabulary counts as rows of its tensor beyond the end, so that padding has
    places like everything else."""
    if not rule.is_vocabulary:
        return rule.blocks
    (block,) = rule.blocks
    size = sum(segment.length for segment in block)
    padding = padded_vocab_size(size, tp) - size
    return ((*block, Segment(block[-1].source, size, padding)),) if padding else (block,)


def shard_segments(rule: Rule, tp: int, tp_rank: int) -> tuple[Segment, ...]:
    """Like `Rule.shard`, with padding as rows beyond the end of the tensor."""
    if rule.axis is None:
        return tuple(segment for block in rule.blocks for segment in block)
    pieces: list[Segment] = []
    for block in padded_blocks(rule, tp):
        share = sum(segment.length for segment in block) // tp
        pieces += cut(block, tp_rank * share, (tp_rank + 1) * share)
    return tuple(pieces)


@dataclass(frozen=True)
class _Entry:
    """Rows `start` … `stop - 1` of a tensor lie from row `place` of a block on; a shard holds `share` of its rows,
    after `before` rows of earlier blocks."""

    start: int
    stop: int
    place: int
    share: int
    before: int


class Places:
    """Where the rows of one kind's tensors lie in its shards over `size` ranks."""

    def __init__(self, kind: Kind, size: int) -> None:
        self._kind = kind
        self._is_cut = kind.rule.axis is not None
        size = size if self._is_cut else 1
        self._entries: dict[str, list[_Entry]] = {}
        before = 0
        for block in padded_blocks(kind.rule, size):
            length = sum(segment.length for segment in block)
            assert length % size == 0, f"{length} rows of {kind.name} do not divide over {size} ranks"
            place = 0
            for segment in block:
                assert segment.source is not None, "padding has been given places"
                stop = segment.start + segment.length
                entry = _Entry(segment.start, stop, place, length // size, before)
                self._entries.setdefault(segment.source, []).append(entry)
                place += segment.length
            before += length // size
        self.shard_length = before
        """Rows of one shard."""
        for entries in self._entries.values():
            entries.sort(key=lambda entry: entry.start)

    def runs(self, source: str, start: int, length: int) -> Iterator[tuple[int, Run]]:
        """(row of the tensor, the run that begins there) for `length` rows of `source` from `start` on, in order.

        Rows that no shard has are left out: padding that only the other layout needs.
        """
        stop = start + length
        for entry in self._entries[source]:
            row, end = max(entry.start, start), min(entry.stop, stop)
            while row < end:
                shard, inside = divmod(entry.place + row - entry.start, entry.share)
                count = min(end - row, entry.share - inside)
                yield row, Run(self._kind, shard if self._is_cut else None, entry.before + inside, count)
                row += count
