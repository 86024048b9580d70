"""Which parameters travel together: buckets of bounded size, the same on all ranks. Imports no torch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megappo.engines.hybrid.kinds import Kinds

_Key = tuple[str, int | None]


@dataclass(frozen=True)
class Buckets:
    """Buckets in the order of the layers of every stage: what a bucket holds comes from all stages, so that no rank
    sends alone while the others wait. A parameter larger than a bucket takes several of its own."""

    count: int
    _of: Mapping[_Key, range]

    @classmethod
    def of(
        cls,
        kinds: Kinds,
        stage_of_layer: Sequence[int],
        training_tp: int,
        generation_tp: int,
        element_bytes: int,
        bucket_bytes: int,
    ) -> "Buckets":
        """Fills buckets with what a rank receives of each parameter at most: its generation shard."""
        assert bucket_bytes >= 1, "a bucket holds at least a byte"
        places = _places_in_stages(stage_of_layer)
        parameters = [(layer, kind) for kind in kinds.kinds for layer in kind.layers]
        parameters.sort(key=lambda each: -1 if each[0] is None else places[each[0]])
        of: dict[_Key, range] = {}
        bucket, filled = 0, 0
        for layer, kind in parameters:
            is_cut = kind.rule.axis is not None
            size = kind.num_elements(training_tp) * element_bytes // (generation_tp if is_cut else 1)
            if filled and filled + size > bucket_bytes:
                bucket, filled = bucket + 1, 0
            parts = max(1, -(-size // bucket_bytes))
            of[kind.name, layer] = range(bucket, bucket + parts)
            bucket, filled = (bucket + parts, 0) if parts > 1 else (bucket, filled + size)
        return cls(bucket + (1 if filled else 0), of)

    def of_parameter(self, name: str, layer: int | None) -> range:
        """The buckets of a parameter, by its kind's name."""
        return self._of[name, layer]


def _places_in_stages(stage_of_layer: Sequence[int]) -> list[int]:
    """Of each layer, how many before it its stage holds."""
    seen: Counter[int] = Counter()
    places = []
    for stage in stage_of_layer:
        places.append(seen[stage])
        seen[stage] += 1
    return places
