"""The experts of a mixture-of-experts decoder: reading their sizes, and their part of the weight map. Imports no torch.

The names on the left are Megatron's (and `models/experts.py`'s), those on the right Hugging Face's.
"""

from dataclasses import dataclass

from megappo.errors import ConfigError
from megappo.models.families.base import HFConfig, ModelShape, MoeShape, required
from megappo.models.families.decoder import LayerPart, dense_mlp, whole
from megappo.models.weight_map import Rule, Segment, Shape

EXPERTS_GATE_UP = "mlp.experts.weight1"
"""In a layer, gate and up rows of all local experts: [experts / ep, 2 · ffn / etp, hidden]."""
EXPERTS_DOWN = "mlp.experts.weight2"
"""In a layer, the down projections of all local experts: [experts / ep, hidden, ffn / etp]."""


def read_experts(
    config: HFConfig,
    *,
    shared_ffn_size: int = 0,
    has_shared_gate: bool = False,
    norm_topk_prob: bool = False,
    ffn_key: str = "moe_intermediate_size",
) -> MoeShape:
    """The sizes that the families share; ConfigError where a count can't be. `norm_topk_prob` is the default."""
    # transformers 5 renames the key of Qwen3-MoE on saving.
    num_experts = config.get("num_experts") or config.get("num_local_experts")
    if num_experts is None:
        num_experts = required(config, "num_experts")
    top_k = int(required(config, "num_experts_per_tok"))
    if top_k > num_experts:
        raise ConfigError(f"config.json: num_experts_per_tok {top_k} is more than the {num_experts} experts")
    stored = config.get("norm_topk_prob")
    if top_k == 1 and stored:
        raise ConfigError(
            "config.json: norm_topk_prob with num_experts_per_tok 1 makes every expert's weight 1, so that the router "
            "would not learn; supported: norm_topk_prob false, or more experts a token"
        )
    return MoeShape(
        num_experts=int(num_experts),
        top_k=top_k,
        ffn_size=int(required(config, ffn_key)),
        shared_ffn_size=shared_ffn_size,
        has_shared_gate=has_shared_gate,
        norm_topk_prob=norm_topk_prob if stored is None else bool(stored),
        dense_layers=_dense_layers(config),
    )


def _dense_layers(config: HFConfig) -> frozenset[int]:
    """Layers without experts: those of `mlp_only_layers`, and all but every `decoder_sparse_step`-th."""
    step, named = int(config.get("decoder_sparse_step") or 1), set(config.get("mlp_only_layers") or ())
    num_layers = int(required(config, "num_hidden_layers"))
    return frozenset(layer for layer in range(num_layers) if layer in named or (layer + 1) % step)


def experts_mlp(shape: ModelShape, layer: int) -> LayerPart:
    """Router, routed experts, and Qwen's shared expert with its gate; a dense feed-forward part in dense layers."""
    assert shape.moe is not None, "a model of this family has experts"
    if layer in shape.moe.dense_layers:
        return dense_mlp(shape, layer)
    part = routed_experts(shape, layer)
    if shape.moe.shared_ffn_size:
        part += shared_expert(shape, layer, "shared_expert")
    if shape.moe.has_shared_gate:
        source = f"model.layers.{layer}.mlp.shared_expert_gate.weight"
        gate = whole(f"decoder.layers.{layer}.mlp.shared_experts.gate_weight", source=source, length=1)
        part += LayerPart({source: (1, shape.hidden_size)}, (gate,))
    return part


@dataclass(frozen=True)
class ExpertNames:
    """Hugging Face's names in a layer: the part with the router `gate` and the experts, and an expert's matrices."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


def routed_experts(shape: ModelShape, layer: int, names: ExpertNames = ExpertNames()) -> LayerPart:
    """Router and experts: two rules, each for all experts of the layer."""
    moe = shape.moe
    assert moe is not None, "a model of this family has experts"
    ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}.{names.block}."
    gate, up, down = (f"{theirs}experts.{{expert}}.{name}.weight" for name in (names.gate, names.up, names.down))
    tensors: dict[str, Shape] = {f"{theirs}gate.weight": (moe.num_experts, shape.hidden_size)}
    for expert in range(moe.num_experts):
        tensors[gate.format(expert=expert)] = (moe.ffn_size, shape.hidden_size)
        tensors[up.format(expert=expert)] = (moe.ffn_size, shape.hidden_size)
        tensors[down.format(expert=expert)] = (shape.hidden_size, moe.ffn_size)
    local = f"{ours}mlp.experts.local_experts.{{expert}}."
    rules = (
        whole(f"{ours}mlp.router.weight", source=f"{theirs}gate.weight", length=moe.num_experts),
        Rule(
            (f"{ours}{EXPERTS_GATE_UP}", f"{local}linear_fc1.weight"), 0,
            ((Segment(gate, 0, moe.ffn_size),), (Segment(up, 0, moe.ffn_size),)), experts=moe.num_experts,
        ),
        Rule(
            (f"{ours}{EXPERTS_DOWN}", f"{local}linear_fc2.weight"), 1,
            ((Segment(down, 0, moe.ffn_size),),), experts=moe.num_experts,
        ),
    )  # fmt: skip
    return LayerPart(tensors, rules)


def shared_expert(shape: ModelShape, layer: int, name: str) -> LayerPart:
    """The expert that every token goes to, cut over the TP ranks like a dense part; `name` is Hugging Face's."""
    moe = shape.moe
    assert moe is not None, "a model of this family has experts"
    return dense_mlp(shape, layer, ours="mlp.shared_experts", theirs=f"mlp.{name}", ffn_size=moe.shared_ffn_size)
