"""DeepSeek-V3 and R1, for planning alone: sizes and the weight map, no layers are built. Imports no torch.

Left out: the multi-token prediction layers (those after `num_hidden_layers`), which neither training nor sampling runs,
the scales of FP8 checkpoints, and RoPE scaling, which has no weights.
"""

from dataclasses import dataclass

from megappo.models.families.base import HFConfig, LatentShape, ModelShape, MoeShape, refuse_unless, required
from megappo.models.families.decoder import LayerPart, decoder_weight_map, dense_mlp, whole
from megappo.models.families.experts import routed_experts, shared_expert
from megappo.models.weight_map import Head, Rule, Segment, Shape, WeightMap


@dataclass(frozen=True)
class DeepseekV3:
    """Latent attention, the first layers dense, then routed and shared experts with a bias for balance."""

    model_type: str = "deepseek_v3"
    value_architecture: str = "DeepseekV3ForSequenceClassification"

    def shape(self, config: HFConfig) -> ModelShape:
        refuse_unless(config, "hidden_act", "silu")
        refuse_unless(config, "attention_bias", False)
        rope_head_dim = int(required(config, "qk_rope_head_dim"))
        num_heads, query_rank = int(required(config, "num_attention_heads")), config.get("q_lora_rank")
        ffn_size = int(required(config, "moe_intermediate_size"))
        rope = config.get("rope_parameters") or config
        return ModelShape(
            num_layers=int(required(config, "num_hidden_layers")),
            hidden_size=int(required(config, "hidden_size")),
            ffn_size=int(required(config, "intermediate_size")),
            num_heads=num_heads,
            # Every head has keys and values of its own once they are projected up.
            num_kv_heads=num_heads,
            head_dim=int(required(config, "qk_nope_head_dim")) + rope_head_dim,
            vocab_size=int(required(config, "vocab_size")),
            max_positions=int(required(config, "max_position_embeddings")),
            norm_eps=float(required(config, "rms_norm_eps")),
            rope_theta=float(rope.get("rope_theta") or 10000.0),
            rope_scaling=None,
            tied=bool(config.get("tie_word_embeddings") or False),
            moe=MoeShape(
                num_experts=int(required(config, "n_routed_experts")),
                top_k=int(required(config, "num_experts_per_tok")),
                ffn_size=ffn_size,
                shared_ffn_size=ffn_size * int(config.get("n_shared_experts") or 0),
                norm_topk_prob=bool(config.get("norm_topk_prob", True)),
                dense_layers=frozenset(range(int(config.get("first_k_dense_replace") or 0))),
            ),
            latent=LatentShape(
                q_rank=None if query_rank is None else int(query_rank),
                kv_rank=int(required(config, "kv_lora_rank")),
                rope_head_dim=rope_head_dim,
                value_head_dim=int(required(config, "v_head_dim")),
            ),
        )

    def weight_map(self, shape: ModelShape, head: Head) -> WeightMap:
        return decoder_weight_map(shape, head, attention=_latent_attention, mlp=_mlp)


def _latent_attention(shape: ModelShape, layer: int) -> LayerPart:
    """Every TP rank holds the down projections whole, and the up projections' rows of its heads."""
    latent = shape.latent
    assert latent is not None, "a DeepSeek-V3 model has latent attention"
    ours, theirs = f"decoder.layers.{layer}.self_attention.", f"model.layers.{layer}.self_attn."
    query_rows = shape.num_heads * shape.head_dim
    key_value_rows = shape.num_heads * (shape.head_dim - latent.rope_head_dim + latent.value_head_dim)
    down_rows, columns = latent.kv_rank + latent.rope_head_dim, shape.num_heads * latent.value_head_dim
    tensors: dict[str, Shape] = {
        f"{theirs}kv_a_proj_with_mqa.weight": (down_rows, shape.hidden_size),
        f"{theirs}kv_a_layernorm.weight": (latent.kv_rank,),
        f"{theirs}kv_b_proj.weight": (key_value_rows, latent.kv_rank),
        f"{theirs}o_proj.weight": (shape.hidden_size, columns),
    }
    rules = [
        whole(f"{ours}linear_kv_down_proj.weight", source=f"{theirs}kv_a_proj_with_mqa.weight", length=down_rows),
        _latent_norm(ours, "kv", f"{theirs}kv_a_layernorm.weight", latent.kv_rank),
        _rows(f"{ours}linear_kv_up_proj.weight", f"{theirs}kv_b_proj.weight", key_value_rows),
        Rule((f"{ours}linear_proj.weight",), 1, ((Segment(f"{theirs}o_proj.weight", 0, columns),),)),
    ]
    if latent.q_rank is None:
        tensors[f"{theirs}q_proj.weight"] = (query_rows, shape.hidden_size)
        rules.append(_rows(f"{ours}linear_q_proj.weight", f"{theirs}q_proj.weight", query_rows))
        return LayerPart(tensors, tuple(rules))
    tensors[f"{theirs}q_a_proj.weight"] = (latent.q_rank, shape.hidden_size)
    tensors[f"{theirs}q_a_layernorm.weight"] = (latent.q_rank,)
    tensors[f"{theirs}q_b_proj.weight"] = (query_rows, latent.q_rank)
    rules += [
        whole(f"{ours}linear_q_down_proj.weight", source=f"{theirs}q_a_proj.weight", length=latent.q_rank),
        _latent_norm(ours, "q", f"{theirs}q_a_layernorm.weight", latent.q_rank),
        _rows(f"{ours}linear_q_up_proj.weight", f"{theirs}q_b_proj.weight", query_rows),
    ]
    return LayerPart(tensors, tuple(rules))


def _latent_norm(ours: str, name: str, source: str, length: int) -> Rule:
    """The norm between down and up projection, which Transformer Engine fuses into the latter."""
    names = (f"{ours}{name}_layernorm.weight", f"{ours}linear_{name}_up_proj.layer_norm_weight")
    return whole(*names, source=source, length=length)


def _rows(name: str, source: str, length: int) -> Rule:
    """A projection whose rows are cut over the TP ranks."""
    return Rule((name,), 0, ((Segment(source, 0, length),),))


def _mlp(shape: ModelShape, layer: int) -> LayerPart:
    moe = shape.moe
    assert moe is not None, "a DeepSeek-V3 model has experts"
    if layer in moe.dense_layers:
        return dense_mlp(shape, layer)
    source = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
    # A buffer in Megatron, which the router's balancing updates.
    bias = whole(f"decoder.layers.{layer}.mlp.router.expert_bias", source=source, length=moe.num_experts)
    part = routed_experts(shape, layer) + LayerPart({source: (moe.num_experts,)}, (bias,))
    return part + shared_expert(shape, layer, "shared_experts") if moe.shared_ffn_size else part
