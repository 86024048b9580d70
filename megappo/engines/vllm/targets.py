"""vLLM's parameters as targets of a plan, for models whose names are Hugging Face's. Imports neither torch nor vllm.

Seen with vLLM 0.20 to 0.32: q, k and v are fused as three blocks of rows (KV heads fewer than ranks are held several
times), gate and up as two; the experts of a layer are `w13_weight` [experts, 2 F, H] and `w2_weight` [experts, H, F].
"""

from collections.abc import Sequence

from megappo.config.grid import GenerationGrid
from megappo.engines.hybrid.kinds import Kind, Kinds, shard_segments
from megappo.engines.hybrid.targets import Target, linear_experts
from megappo.models.families.base import ModelShape
from megappo.models.weight_map import EXPERT, Segment

_RENAMED = (
    (f"experts.{EXPERT}.gate_proj.weight", "experts.w13_weight"),
    (f"experts.{EXPERT}.down_proj.weight", "experts.w2_weight"),
    (".gate_proj.", ".gate_up_proj."),
    (".q_proj.", ".qkv_proj."),
)


class VLLMTargets:
    """The parameters of vLLM ranks laid over `grid`; with `expert_parallel` each rank holds whole experts."""

    def __init__(self, kinds: Kinds, shape: ModelShape, grid: GenerationGrid, *, expert_parallel: bool) -> None:
        self._kinds = kinds
        self._shape = shape
        self._grid = grid
        self._expert_parallel = expert_parallel
        self._cache: dict[int, tuple[Target, ...]] = {}

    def of(self, rank: int) -> Sequence[Target]:
        place = self._grid.tp_rank(rank)
        if place not in self._cache:
            self._cache[place] = tuple(self._made(kind, place) for kind in self._kinds.kinds)
        return self._cache[place]

    def _made(self, kind: Kind, place: int) -> Target:
        rule, size, experts = kind.rule, self._grid.tp, None
        segments = shard_segments(rule, size, place)
        if rule.experts is not None:
            experts = tuple(range(rule.experts))
            if self._expert_parallel:
                experts = linear_experts(rule.experts, size, place)
                segments = shard_segments(rule, 1, 0)
        elif ".q_proj." in rule.sources[0] or ".qkv_proj." in rule.sources[0]:
            segments = self._qkv(kind, place)
        return Target(
            name=vllm_name(kind),
            layers=kind.layers,
            axis=kind.axis,
            width=kind.width,
            weight_class=rule.weight_class,
            segments=segments,
            experts=experts,
        )

    def _qkv(self, kind: Kind, place: int) -> tuple[Segment, ...]:
        """The rank's q rows, its k rows, its v rows."""
        size, shape = self._grid.tp, self._shape
        all_query_rows, all_kv_rows = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        query_rows = all_query_rows // size
        copies = max(1, size // shape.num_kv_heads)  # ranks that hold the same KV head
        kv_rows = shape.num_kv_heads * shape.head_dim * copies // size
        first = place // copies * kv_rows
        if len(kind.rule.sources) == 1:  # one tensor with the rows of all three
            query = key = value = kind.rule.sources[0]
            key_start, value_start = all_query_rows, all_query_rows + all_kv_rows
        else:
            query, key, value = kind.rule.sources
            key_start = value_start = 0
        return (
            Segment(query, place * query_rows, query_rows),
            Segment(key, key_start + first, kv_rows),
            Segment(value, value_start + first, kv_rows),
        )


def vllm_name(kind: Kind) -> str:
    """vLLM's name of a parameter: Hugging Face's, but for those that it fuses."""
    name = kind.rule.sources[0]
    for theirs, fused in _RENAMED:
        if theirs in name:
            return name.replace(theirs, fused)
    return name
