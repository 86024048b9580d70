"""Which parameters travel together: buckets of bounded size, the same on all ranks. Imports no torch."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megappo.engines.hybrid.kinds import Kind, Kinds
from megappo.engines.hybrid.traffic import Traffic
from megappo.errors import ConfigError

_Key = tuple[str, int | None]
_Parameters = list[tuple[Kind, int | None, tuple[int, ...]]]
"""Kind, layer, and the stages that hold it."""


@dataclass(frozen=True)
class Buckets:
    """Buckets in the order of the layers of every stage: what a bucket holds comes from all stages, so that no rank
    sends alone while the others wait. What is larger than a bucket takes several of its own.

    `sizes`: of each bucket, the bytes that a rank receives and sends at once at most, whatever rank it is.
    """

    sizes: tuple[int, ...]
    _of: Mapping[_Key, range]

    @classmethod
    def of(cls, kinds: Kinds, stages_of: "StagesOf", traffic: Traffic, bucket_bytes: int) -> "Buckets":
        """Fills buckets up to `bucket_bytes` on the rank with most. ConfigError where a row to each of its peers is
        more than that."""
        assert bucket_bytes >= 1, "a bucket holds at least a byte"
        of: dict[_Key, range] = {}
        sizes: list[int] = []
        filled: list[int] = []  # of the last bucket, by stage
        for parameters in _together(kinds, stages_of):
            loads = _loads(traffic, parameters, 1)
            both = [old + new for old, new in zip(filled, loads, strict=True)] if filled else loads
            if filled and max(both) <= bucket_bytes:
                filled, sizes[-1] = both, max(both)
                buckets = range(len(sizes) - 1, len(sizes))
            elif max(loads) <= bucket_bytes:
                filled = loads
                sizes.append(max(loads))
                buckets = range(len(sizes) - 1, len(sizes))
            else:
                count, size = _cut(traffic, parameters, bucket_bytes)
                filled, buckets = [], range(len(sizes), len(sizes) + count)
                sizes += [size] * count
            of |= {(kind.name, layer): buckets for kind, layer, _ in parameters}
        return cls(tuple(sizes), of)

    @property
    def count(self) -> int:
        return len(self.sizes)

    @property
    def extra_bytes(self) -> int:
        """Most bytes that a switch stages on any rank: a bucket, and the next one, which is posted before the first is
        done. They take turns with two pieces of memory, one for the even and one for the odd ones."""
        return max(self.sizes[::2], default=0) + max(self.sizes[1::2], default=0)

    def of_parameter(self, name: str, layer: int | None) -> range:
        """The buckets of a parameter, by its kind's name."""
        return self._of[name, layer]


@dataclass(frozen=True)
class StagesOf:
    """Where parameters are: the stage of each layer, and the stages of the kinds that lie outside of them."""

    layers: Sequence[int]
    ends: Mapping[str, tuple[int, ...]]

    def __call__(self, kind: Kind, layer: int | None) -> tuple[int, ...]:
        return self.ends[kind.name] if layer is None else (self.layers[layer],)


def _together(kinds: Kinds, stages_of: StagesOf) -> Iterator[_Parameters]:
    """What travels at once in any case: one kind of the layers at the same place in their stages; first the parameters
    of both ends of the model."""
    places = _places_in_stages(stages_of.layers)
    groups: dict[tuple[int, _Key | None], _Parameters] = {}
    for kind in kinds.kinds:
        for layer in kind.layers:
            group = (-1, None) if layer is None else (places[layer], kind.key)
            groups.setdefault(group, []).append((kind, layer, stages_of(kind, layer)))
    yield from (groups[group] for group in sorted(groups, key=lambda group: group[0]))


def _loads(traffic: Traffic, parameters: _Parameters, num_parts: int) -> list[int]:
    """Bytes under way by stage, where each travels in `num_parts` parts."""
    each = (traffic.busiest(kind, stages, num_parts) for kind, _, stages in parameters)
    return [sum(of_stage) for of_stage in zip(*each, strict=True)]


def _cut(traffic: Traffic, parameters: _Parameters, bucket_bytes: int) -> tuple[int, int]:
    """(parts, bytes of the largest) of parameters that are larger than a bucket."""
    most = max(traffic.most_lines(kind) for kind, *_ in parameters)
    count, size = 1, max(_loads(traffic, parameters, 1))
    while size > bucket_bytes:
        if count == most:
            raise ConfigError(
                f"hybrid.bucket_mib: a row of {parameters[0][0].name} to each rank that takes it is {size:,} bytes at "
                f"once, more than the {bucket_bytes:,} of a bucket; set it to at least {-(-size // 2**20)}"
            )
        count = min(most, max(count + 1, -(-count * size // bucket_bytes)))
        size = max(_loads(traffic, parameters, count))
    return count, size


def _places_in_stages(stage_of_layer: Sequence[int]) -> list[int]:
    """Of each layer, how many before it its stage holds."""
    seen: Counter[int] = Counter()
    places = []
    for stage in stage_of_layer:
        places.append(seen[stage])
        seen[stage] += 1
    return places
