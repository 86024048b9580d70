"""vLLM's parameters as targets of a plan, for models whose names are Hugging Face's. Imports neither torch nor vllm.

Seen with vLLM 0.20 to 0.32: q, k and v are fused as three blocks of rows (KV heads fewer than ranks are held several
times), gate and up as two; the experts of a layer are `w13_weight` [experts, 2 F, H] and `w2_weight` [experts, H, F].
Of latent attention (DeepSeek) the two down projections are one parameter, which every rank holds whole.
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
    (f"experts.{EXPERT}.w1.weight", "experts.w13_weight"),
    (f"experts.{EXPERT}.w2.weight", "experts.w2_weight"),
    (".gate_proj.", ".gate_up_proj."),
    (".q_proj.", ".qkv_proj."),
)
_QUERY_DOWN, _KEY_VALUE_DOWN, _FUSED_DOWN = ".q_a_proj.", ".kv_a_proj_with_mqa.", ".fused_qkv_a_proj."


class VLLMTargets:
    """The parameters of vLLM ranks laid over `grid`; with `expert_parallel` each rank holds whole experts.

    `latent_kernels`: latent attention runs in vLLM's kernels for it, which want the down projections fused; else it is
    spelled out, in Hugging Face's parameters.
    """

    def __init__(
        self,
        kinds: Kinds,
        shape: ModelShape,
        grid: GenerationGrid,
        *,
        expert_parallel: bool,
        latent_kernels: bool = True,
    ) -> None:
        self._kinds = kinds
        self._shape = shape
        self._grid = grid
        self._expert_parallel = expert_parallel
        latent = shape.latent
        self._fuses_down = latent is not None and latent.q_rank is not None and latent_kernels
        self._cache: dict[int, tuple[Target, ...]] = {}

    def of(self, rank: int) -> Sequence[Target]:
        place = self._grid.tp_rank(rank)
        if place not in self._cache:
            kinds = [kind for kind in self._kinds.kinds if not self._is_fused_behind(kind)]
            self._cache[place] = tuple(self._made(kind, place) for kind in kinds)
        return self._cache[place]

    def _is_fused_behind(self, kind: Kind) -> bool:
        """Whether the kind's rows are part of the query's fused down projection."""
        return self._fuses_down and _KEY_VALUE_DOWN in kind.rule.sources[0]

    def _made(self, kind: Kind, place: int) -> Target:
        rule, size, experts = kind.rule, self._grid.tp, None
        segments = shard_segments(rule, size, place)
        if rule.experts is not None:
            experts = tuple(range(rule.experts))
            if self._expert_parallel:
                experts = linear_experts(rule.experts, size, place)
                segments = shard_segments(rule, 1, 0)
        elif self._shape.latent is None and (".q_proj." in rule.sources[0] or ".qkv_proj." in rule.sources[0]):
            segments = self._qkv(kind, place)
        elif self._fuses_down and _QUERY_DOWN in rule.sources[0]:
            segments += self._key_value_down(rule.sources[0])
        return Target(
            name=self._name(kind),
            layers=kind.layers,
            axis=kind.axis,
            width=kind.width,
            weight_class=rule.weight_class,
            segments=segments,
            experts=experts,
        )

    def _name(self, kind: Kind) -> str:
        source = kind.rule.sources[0]
        if self._fuses_down and _QUERY_DOWN in source:
            return source.replace(_QUERY_DOWN, _FUSED_DOWN)
        # Latent attention has queries apart from keys and values, under Hugging Face's name.
        return source if self._shape.latent is not None and ".self_attn." in source else vllm_name(kind)

    def _key_value_down(self, query_down: str) -> tuple[Segment, ...]:
        latent = self._shape.latent
        assert latent is not None, "only latent attention has down projections"
        source = query_down.replace(_QUERY_DOWN, _KEY_VALUE_DOWN)
        return (Segment(source, 0, latent.kv_rank + latent.rope_head_dim),)

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
