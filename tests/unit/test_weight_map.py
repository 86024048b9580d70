"""The weight map's segments against orders written down by hand, and that each Hugging Face row has one place."""

import subprocess
import sys
from dataclasses import replace

import pytest

from megappo.models.families import FAMILIES
from megappo.models.families.base import ModelShape
from megappo.models.weight_map import Head, Rule, Segment, WeightMap, padded_vocab_size

SHAPE = ModelShape(
    num_layers=2, hidden_size=8, ffn_size=6, num_heads=4, num_kv_heads=2, head_dim=2, vocab_size=100, max_positions=16,
    norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, tied=False,
)  # fmt: skip
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


def test_heads() -> None:
    assert rule("output_layer.weight").sources == ("lm_head.weight",)
    tied = rule("output_layer.weight", replace(SHAPE, tied=True))
    assert tied.sources == ("model.embed_tokens.weight",) and tied.is_copy
    value = rule("output_layer.weight", replace(SHAPE, tied=True), "value")
    assert value.sources == ("score.weight",) and value.is_optional and not value.is_copy


def covered(weight_map: WeightMap, tp: int) -> dict[str, list[int]]:
    """Tensor → how often each of its rows (or columns) is held, over all ranks and parameters that an export reads."""
    counts: dict[str, list[int]] = {}
    for entry in weight_map.rules:
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
        SHAPE, num_kv_heads=num_kv_heads, ffn_size=8, tied=family != "llama", qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )  # fmt: skip
    weight_map = FAMILIES[family].weight_map(shape, head)
    assert covered(weight_map, tp) == {
        # The axis along which a tensor is cut is its second one for o_proj and down_proj.
        name: [1] * size[1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0]
        for name, size in weight_map.tensors.items()
    }


def test_families_import_no_torch() -> None:
    code = "import sys, megappo.models.architecture; sys.exit('torch' in sys.modules or 'megatron' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
