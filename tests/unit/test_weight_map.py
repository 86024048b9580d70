"""The weight map's segments against orders written down by hand, and that each Hugging Face row has one place."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

from megappo.models.families import FAMILIES
from megappo.models.families.base import LatentShape, ModelShape, MoeShape
from megappo.models.weight_map import Head, Rule, Segment, WeightMap, padded_vocab_size

SHAPE = ModelShape(
    num_layers=2, hidden_size=8, ffn_size=6, num_heads=4, num_kv_heads=2, head_dim=2, vocab_size=100, max_positions=16,
    norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, tied=False,
)  # fmt: skip
MOE = MoeShape(num_experts=4, top_k=2, ffn_size=12, shared_ffn_size=16, has_shared_gate=True)
LATENT = LatentShape(q_rank=6, kv_rank=4, rope_head_dim=2, value_head_dim=4)
Q, K, V = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv")
QKV = "decoder.layers.1.self_attention.linear_qkv.weight"


def rule(name: str, shape: ModelShape = SHAPE, head: Head = "lm", family: str = "llama") -> Rule:
    return FAMILIES[family].weight_map(shape, head).by_parameter()[name]


def test_qkv_is_interleaved_by_kv_head() -> None:
    # Two groups of 2 query heads, 1 K and 1 V head of 2 rows each: q0 q1 k0 v0 | q2 q3 k1 v1.
    group_0 = (Segment(Q, 0, 4), Segment(K, 0, 2), Segment(V, 0, 2))
    group_1 = (Segment(Q, 4, 4), Segment(K, 2, 2), Segment(V, 2, 2))
    assert rule(QKV).shard(1, 0) == group_0 + group_1
    assert [rule(QKV).shard(2, rank) for rank in range(2)] == [group_0, group_1]


def test_with_fewer_kv_heads_than_ranks_a_shard_can_be_k_and_v_alone() -> None:
    shards = [rule(QKV).shard(4, rank) for rank in range(4)]
    assert shards == [
        (Segment(Q, 0, 4),),
        (Segment(K, 0, 2), Segment(V, 0, 2)),
        (Segment(Q, 4, 4),),
        (Segment(K, 2, 2), Segment(V, 2, 2)),
    ]
    # One KV head: 8 + 2 + 2 rows over 2 ranks are cut at row 6, inside the query heads.
    single = rule(QKV, replace(SHAPE, num_kv_heads=1))
    assert single.shard(2, 0) == (Segment(Q, 0, 6),)
    assert single.shard(2, 1) == (Segment(Q, 6, 2), Segment(K, 0, 2), Segment(V, 0, 2))


def test_a_rank_holds_its_gate_rows_then_its_up_rows() -> None:
    gate, up = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))
    fused = rule("decoder.layers.0.mlp.linear_fc1.weight")
    assert fused.shard(1, 0) == (Segment(gate, 0, 6), Segment(up, 0, 6))
    assert fused.shard(2, 1) == (Segment(gate, 3, 3), Segment(up, 3, 3))


def test_row_parallel_weights_are_cut_by_columns() -> None:
    down = rule("decoder.layers.0.mlp.linear_fc2.weight")
    assert down.axis == 1
    assert down.shard(2, 1) == (Segment("model.layers.0.mlp.down_proj.weight", 3, 3),)


def test_the_vocabulary_ends_in_padding_without_a_source() -> None:
    embedding = rule("embedding.word_embeddings.weight")
    assert embedding.shard(1, 0) == (Segment("model.embed_tokens.weight", 0, 100), Segment(None, 0, 28))
    assert embedding.shard(2, 1) == (Segment("model.embed_tokens.weight", 64, 36), Segment(None, 0, 28))
    assert embedding.shard(4, 3) == (Segment("model.embed_tokens.weight", 96, 4), Segment(None, 0, 28))
    assert embedding.shard(8, 7) == (Segment(None, 0, 16),)


@pytest.mark.parametrize(
    ("vocab_size", "tp", "padded"), [(100, 1, 128), (100, 4, 128), (128, 2, 128), (49152, 3, 49152), (49153, 3, 49344)]
)
def test_padded_vocabulary(vocab_size: int, tp: int, padded: int) -> None:
    assert padded_vocab_size(vocab_size, tp) == padded


def test_norms_have_a_name_with_and_without_transformer_engine() -> None:
    names = rule("decoder.layers.0.input_layernorm.weight").names
    assert names == (
        "decoder.layers.0.input_layernorm.weight",
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
    )
    assert rule(names[1]).shard(2, 1) == (Segment("model.layers.0.input_layernorm.weight", 0, 8),)


def test_q_k_and_v_of_one_tensor_are_cut_like_those_of_three() -> None:
    # Query rows 0–7, key rows 8–11, value rows 12–15 of one tensor, in the order of the groups.
    source = "model.layers.1.self_attn.qkv_proj.weight"
    fused = rule(QKV, family="phi3")
    assert fused.shard(2, 0) == (Segment(source, 0, 4), Segment(source, 8, 2), Segment(source, 12, 2))
    assert fused.shard(2, 1) == (Segment(source, 4, 4), Segment(source, 10, 2), Segment(source, 14, 2))
    gate_up = "model.layers.0.mlp.gate_up_proj.weight"
    for family in ("phi3", "glm", "glm4"):
        both = rule("decoder.layers.0.mlp.linear_fc1.weight", family=family)
        assert both.shard(2, 1) == (Segment(gate_up, 3, 3), Segment(gate_up, 9, 3))
        assert FAMILIES[family].weight_map(SHAPE, "lm").tensors[gate_up] == (12, 8)


@pytest.mark.parametrize(
    ("family", "after_attention", "before_mlp", "after_mlp"),
    [
        ("glm4", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
        ("gemma2", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
        ("gemma3_text", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ],
)
def test_norms_on_the_way_to_the_residual_stream(
    family: str, after_attention: str, before_mlp: str, after_mlp: str
) -> None:
    for name, source in (
        ("self_attn_bda.norm", after_attention), ("pre_mlp_layernorm", before_mlp), ("mlp_bda.norm", after_mlp)
    ):  # fmt: skip
        one = rule(f"decoder.layers.1.{name}.weight", family=family)
        assert one.sources == (f"model.layers.1.{source}.weight",) and one.axis is None


def test_heads() -> None:
    assert rule("output_layer.weight").sources == ("lm_head.weight",)
    tied = rule("output_layer.weight", replace(SHAPE, tied=True))
    assert tied.sources == ("model.embed_tokens.weight",) and tied.is_copy
    value = rule("output_layer.weight", replace(SHAPE, tied=True), "value")
    assert value.sources == ("score.weight",) and value.is_optional and not value.is_copy


def test_the_experts_of_a_layer_are_one_rule() -> None:
    weight_map = FAMILIES["qwen3_moe"].weight_map(replace(SHAPE, moe=MOE), "lm")
    experts = weight_map.by_parameter()["decoder.layers.1.mlp.experts.weight1"]
    gate, up = (f"model.layers.1.mlp.experts.{{expert}}.{name}_proj.weight" for name in ("gate", "up"))
    assert experts.names[1] == "decoder.layers.1.mlp.experts.local_experts.{expert}.linear_fc1.weight"
    assert (experts.experts, experts.weight_class, experts.axis) == (4, "experts", 0)
    assert experts.shard(1, 0) == (Segment(gate, 0, 12), Segment(up, 0, 12))
    # With expert tensor parallelism of 2, its second rank holds the second half of either.
    third = experts.of_expert(2)
    gate_2, up_2 = (f"model.layers.1.mlp.experts.2.{name}_proj.weight" for name in ("gate", "up"))
    assert third.shard(2, 1) == (Segment(gate_2, 6, 6), Segment(up_2, 6, 6))
    assert third.names[1] == "decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight"
    assert third.sources == (gate_2, up_2)
    assert weight_map.tensors[gate_2] == (12, 8)
    down = weight_map.by_parameter()["decoder.layers.1.mlp.experts.weight2"].of_expert(3)
    assert down.shard(2, 0) == (Segment("model.layers.1.mlp.experts.3.down_proj.weight", 0, 6),) and down.axis == 1


def test_router_and_shared_expert() -> None:
    rules = FAMILIES["qwen2_moe"].weight_map(replace(SHAPE, moe=MOE), "lm").by_parameter()
    router = rules["decoder.layers.0.mlp.router.weight"]
    assert (router.weight_class, router.sources) == ("replicated", ("model.layers.0.mlp.gate.weight",))
    shared = rules["decoder.layers.0.mlp.shared_experts.linear_fc1.weight"]
    gate, up = (f"model.layers.0.mlp.shared_expert.{name}_proj.weight" for name in ("gate", "up"))
    assert shared.weight_class == "dense" and shared.shard(2, 1) == (Segment(gate, 8, 8), Segment(up, 8, 8))
    assert rules["decoder.layers.0.mlp.shared_experts.gate_weight"].sources == (
        "model.layers.0.mlp.shared_expert_gate.weight",
    )


def test_layers_without_experts_are_dense() -> None:
    shape = replace(SHAPE, moe=replace(MOE, dense_layers=frozenset({0})))
    rules = FAMILIES["qwen3_moe"].weight_map(shape, "lm").by_parameter()
    assert rules["decoder.layers.0.mlp.linear_fc1.weight"].shard(1, 0)[0].length == SHAPE.ffn_size
    assert "decoder.layers.0.mlp.router.weight" not in rules and "decoder.layers.1.mlp.router.weight" in rules


def test_latent_attention_is_cut_by_heads_after_the_low_rank() -> None:
    shape = replace(SHAPE, head_dim=6, moe=MOE, latent=LATENT)
    rules = FAMILIES["deepseek_v3"].weight_map(shape, "lm").by_parameter()
    attention = "decoder.layers.0.self_attention."
    down = rules[f"{attention}linear_kv_down_proj.weight"]
    assert (down.weight_class, down.shard(2, 1)) == (
        "replicated", (Segment("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", 0, 4 + 2),)
    )  # fmt: skip
    # 4 heads of 4 key rows without positions and 4 value rows; the second of two ranks has heads 2 and 3.
    assert rules[f"{attention}linear_kv_up_proj.weight"].shard(2, 1) == (
        Segment("model.layers.0.self_attn.kv_b_proj.weight", 16, 16),
    )
    assert rules[f"{attention}linear_q_up_proj.weight"].shard(2, 1) == (
        Segment("model.layers.0.self_attn.q_b_proj.weight", 12, 12),
    )
    output = rules[f"{attention}linear_proj.weight"]
    assert (output.axis, output.shard(2, 1)) == (1, (Segment("model.layers.0.self_attn.o_proj.weight", 8, 8),))


def test_deepseek_v3_has_the_tensors_of_hugging_faces_model(tmp_path: Path) -> None:
    import transformers

    config = transformers.DeepseekV3Config(
        vocab_size=64, hidden_size=16, intermediate_size=24, moe_intermediate_size=12, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, n_shared_experts=2, n_routed_experts=4, kv_lora_rank=6,
        q_lora_rank=8, qk_rope_head_dim=4, v_head_dim=10, qk_nope_head_dim=14, n_group=1, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=1,
    )  # fmt: skip
    transformers.DeepseekV3ForCausalLM(config).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    family = FAMILIES["deepseek_v3"]
    shape = family.shape(json.loads((tmp_path / "config.json").read_text()))
    assert family.weight_map(shape, "lm").tensors == {
        name: size for name, size in stored.items() if not name.startswith("model.layers.2.")
    }


def covered(weight_map: WeightMap, tp: int) -> dict[str, list[int]]:
    """Tensor → how often each of its rows (or columns) is held, over all ranks and parameters that an export reads."""
    counts: dict[str, list[int]] = {}
    rules = (
        rule.of_expert(expert) if rule.experts else rule
        for rule in weight_map.rules
        for expert in range(rule.experts or 1)
    )
    for entry in rules:
        ranks = range(tp) if entry.axis is not None else range(1)
        for segment in (segment for rank in ranks for segment in entry.shard(tp, rank)):
            if segment.source is not None and not entry.is_copy:
                size = weight_map.tensors[segment.source][entry.axis or 0]
                rows = counts.setdefault(segment.source, [0] * size)
                for row in range(segment.start, segment.start + segment.length):
                    rows[row] += 1
    return counts


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_every_row_of_every_tensor_is_held_once(family: str, head: Head, tp: int, num_kv_heads: int) -> None:
    shape = replace(
        SHAPE, num_kv_heads=num_kv_heads, ffn_size=8, tied=family != "llama", qkv_bias=family.startswith("qwen2"),
        qk_norm=family.startswith("qwen3"), moe=MOE, latent=LATENT,
    )  # fmt: skip
    weight_map = FAMILIES[family].weight_map(shape, head)
    assert covered(weight_map, tp) == {
        # The axis along which a tensor is cut is its second one for o_proj and down_proj (Mixtral's w2).
        name: [1] * size[1 if name.endswith(("o_proj.weight", "down_proj.weight", ".w2.weight")) else 0]
        for name, size in weight_map.tensors.items()
    }


def test_families_import_no_torch() -> None:
    code = "import sys, megappo.models.architecture; sys.exit('torch' in sys.modules or 'megatron' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
