"""DeepSeek-V2 (and its lite and coder models), DeepSeek-V3 and R1. Imports no torch.

Left out: the multi-token prediction layers (those after `num_hidden_layers`), which neither training nor sampling runs,
and the scales of FP8 checkpoints. A folder with either is refused when its weights are read.
"""

from dataclasses import dataclass, replace
from typing import Any

from megappo.errors import ConfigError
from megappo.models.families.base import (
    HFConfig,
    LatentShape,
    ModelShape,
    MoeShape,
    YarnRopeScaling,
    read_theta,
    refuse_unless,
    required,
    rope_keys,
    rope_kind,
)
from megappo.models.families.decoder import LayerPart, decoder_weight_map, dense_mlp, whole
from megappo.models.families.experts import routed_experts, shared_expert
from megappo.models.weight_map import Head, Rule, Segment, Shape, WeightMap

NORM_EPS = 1e-6
"""Hugging Face's norms inside of latent attention have it, whatever the configuration says of the others."""


@dataclass(frozen=True)
class DeepseekV3:
    """Latent attention, the first layers dense, then shared experts and routed ones, whose scores have a bias for
    balance, which stays as it is."""

    model_type: str = "deepseek_v3"
    value_architecture: str = "DeepseekV3ForSequenceClassification"

    def shape(self, config: HFConfig) -> ModelShape:
        """Sizes from `config.json`; an expert group's score is the sum of its two best experts'.

        Keys that the file leaves out have the values of Hugging Face's DeepseekV3Config. Raises ConfigError for routing
        without sigmoid scores and a bias for balance, rotary dimensions that are not interleaved, and groups that the
        experts do not make.
        """
        refuse_unless(config, "scoring_func", "sigmoid")
        refuse_unless(config, "topk_method", "noaux_tc")
        refuse_unless(config, "rope_interleave", True)
        # The configuration class's values where config.json has none.
        config = {
            "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "n_shared_experts": 1,
            "first_k_dense_replace": 3, "q_lora_rank": 1536, **config,
        }  # fmt: skip
        return _shape(
            config, score="sigmoid", has_bias=True, norm_topk_prob=bool(config.get("norm_topk_prob", True)),
            **_groups(config, best_of_group=2),
        )  # fmt: skip

    def weight_map(self, shape: ModelShape, head: Head) -> WeightMap:
        return decoder_weight_map(shape, head, attention=_latent_attention, mlp=_mlp)


@dataclass(frozen=True)
class DeepseekV2:
    """The same without a bias: scores are a softmax, and the weights of a token's experts don't sum to 1."""

    model_type: str = "deepseek_v2"
    value_architecture: str = "DeepseekV2ForSequenceClassification"

    def shape(self, config: HFConfig) -> ModelShape:
        """Sizes from `config.json`. Raises ConfigError for routing that is not DeepSeek-V2's."""
        # The configuration class's values where config.json has none.
        config = {"n_shared_experts": 2, "q_lora_rank": 1536, **config}
        refuse_unless(config, "scoring_func", "softmax")
        refuse_unless(config, "norm_topk_prob", False)
        method = config.get("topk_method") or "greedy"
        if method == "greedy":
            return _shape(config)
        if method != "group_limited_greedy":
            raise ConfigError(
                f"config.json: topk_method is {method!r}, which megappo's deepseek_v2 layers do not compute; "
                "supported: 'greedy', 'group_limited_greedy'"
            )
        return _shape(config, **_groups(config, best_of_group=1))

    def weight_map(self, shape: ModelShape, head: Head) -> WeightMap:
        return decoder_weight_map(shape, head, attention=_latent_attention, mlp=_mlp)


def _shape(config: HFConfig, **router: Any) -> ModelShape:
    """The shape from the keys that both share; `router` is what differs in `MoeShape`."""
    for key, supported in (
        ("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False), ("moe_layer_freq", 1),
        ("rms_norm_eps", NORM_EPS),
    ):  # fmt: skip
        refuse_unless(config, key, supported)
    rope_head_dim = int(required(config, "qk_rope_head_dim"))
    num_heads, query_rank = int(required(config, "num_attention_heads")), config.get("q_lora_rank")
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
        norm_eps=float(config.get("rms_norm_eps") or NORM_EPS),
        rope_theta=read_theta(config),
        rope_scaling=None,
        tied=bool(config.get("tie_word_embeddings") or False),
        moe=replace(_experts(config), **router),
        latent=LatentShape(
            q_rank=None if query_rank is None else int(query_rank),
            kv_rank=int(required(config, "kv_lora_rank")),
            rope_head_dim=rope_head_dim,
            value_head_dim=int(required(config, "v_head_dim")),
            yarn=_yarn(config),
        ),
    )


def _groups(config: HFConfig, best_of_group: int) -> dict[str, int]:
    """The groups of experts in `MoeShape`. ConfigError where the experts do not make so many."""
    num_experts, num_groups = int(required(config, "n_routed_experts")), int(required(config, "n_group"))
    top_groups = int(required(config, "topk_group")) if num_groups > 1 else 1
    if num_groups < 1 or num_experts % num_groups or num_experts // num_groups < best_of_group:
        raise ConfigError(
            f"config.json: n_routed_experts {num_experts} are not n_group {num_groups} equal groups of at least "
            f"{best_of_group}; give the number of groups that the model was trained with (1 for none)"
        )
    if not 1 <= top_groups <= num_groups:
        raise ConfigError(
            f"config.json: topk_group {top_groups} is none of 1 to n_group {num_groups}; give the number of groups "
            "that the model was trained with"
        )
    return {"num_groups": num_groups, "top_groups": top_groups, "best_of_group": best_of_group}


def _experts(config: HFConfig) -> MoeShape:
    ffn_size, num_layers = int(required(config, "moe_intermediate_size")), int(required(config, "num_hidden_layers"))
    num_dense = int(config.get("first_k_dense_replace") or 0)
    return MoeShape(
        num_experts=int(required(config, "n_routed_experts")),
        top_k=int(required(config, "num_experts_per_tok")),
        ffn_size=ffn_size,
        shared_ffn_size=ffn_size * int(config.get("n_shared_experts") or 0),
        scaling=float(config.get("routed_scaling_factor") or 1.0),
        dense_layers=frozenset(range(min(num_dense, num_layers))),
    )


def _yarn(config: HFConfig) -> YarnRopeScaling | None:
    rope = rope_keys(config)
    kind = rope_kind(rope)
    if kind == "default":
        return None
    if kind != "yarn":
        raise ConfigError(f"config.json: RoPE scaling {kind!r} is not supported; supported: 'default', 'yarn'")
    _refuse_other_yarn(rope)
    return YarnRopeScaling(
        factor=float(required(rope, "factor")),
        original_max_positions=int(required(rope, "original_max_position_embeddings")),
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        mscale=float(rope.get("mscale") or 1.0),
        mscale_all_dim=float(rope.get("mscale_all_dim") or 0.0),
    )


def _refuse_other_yarn(rope: HFConfig) -> None:
    """ConfigError where Hugging Face's models have another YaRN than Megatron and vLLM (0.32.0).

    Those two multiply RoPE with the quotient of both mscales' factors, whatever is set. Hugging Face takes it where
    both are set, the factor of mscale 1 otherwise, and `attention_factor` before either.
    """
    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if not (mscale and all_dim) and not (mscale in (None, 1) and not all_dim):
        raise ConfigError(
            f"config.json: YaRN with mscale {mscale} and mscale_all_dim {all_dim} is not supported, for which "
            "Hugging Face and vLLM compute different attention; give both, or neither, as the model was trained"
        )
    for key, supported in (("attention_factor", None), ("truncate", True)):
        if rope.get(key, supported) not in (None, supported):
            raise ConfigError(
                f"config.json: YaRN with {key} {rope[key]!r} is not supported, which Megatron and vLLM do not compute; "
                "take it out if the model was trained without"
            )


def _latent_attention(shape: ModelShape, layer: int) -> LayerPart:
    """Every TP rank holds the down projections whole, and the up projections' rows of its heads."""
    latent = shape.latent
    assert latent is not None, "a DeepSeek model has latent attention"
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
    assert moe is not None, "a DeepSeek model has experts"
    if layer in moe.dense_layers:
        return dense_mlp(shape, layer)
    part = routed_experts(shape, layer)
    if moe.has_bias:
        source = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        bias = whole(f"decoder.layers.{layer}.mlp.router.expert_bias", source=source, length=moe.num_experts)
        bias = replace(bias, is_float32=True)
        part += LayerPart({source: (moe.num_experts,)}, (bias,))
    return part + shared_expert(shape, layer, "shared_experts") if moe.shared_ffn_size else part
