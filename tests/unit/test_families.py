"""Reading config.json: shapes that the model cards give, and settings that are refused instead of computed wrongly."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megappo.config.layout import LayoutConfig
from megappo.config.model_folder import read_model_facts
from megappo.errors import ConfigError, DataError
from megappo.models.architecture import check_layout, read_model
from megappo.models.families import FAMILIES
from megappo.models.families.base import Llama3RopeScaling, MoeShape
from megappo.models.families.published import PUBLISHED

LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def test_both_ways_of_writing_rope() -> None:
    scaling = Llama3RopeScaling(32.0, 1.0, 4.0, 8192)
    before = FAMILIES["llama"].shape(LLAMA | {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE})
    since_5 = FAMILIES["llama"].shape(LLAMA | {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 500000.0}})
    assert before == since_5
    assert (before.rope_theta, before.rope_scaling) == (500000.0, scaling)
    assert before.head_dim == 64 and before.queries_per_group == 4 and before.tied


def test_defaults_of_the_configuration_classes() -> None:
    bare = {key: value for key, value in LLAMA.items() if key not in ("num_key_value_heads", "tie_word_embeddings")}
    shape = FAMILIES["llama"].shape(bare)
    assert shape.num_kv_heads == 32 and not shape.tied and shape.rope_theta == 10000.0
    assert FAMILIES["qwen3"].shape(bare | {"model_type": "qwen3"}).head_dim == 128
    assert FAMILIES["qwen2"].shape(bare | {"model_type": "qwen2"}).qkv_bias


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


SIZES: dict[str, Any] = {
    "num_hidden_layers": 12, "hidden_size": 1024, "intermediate_size": 512, "num_attention_heads": 64,
    "num_key_value_heads": 64, "vocab_size": 128, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "pad_token_id": 0,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 3, "norm_topk_prob": True}
QWEN_EXPERTS = EXPERTS | {"num_experts": 8, "moe_intermediate_size": 96, "decoder_sparse_step": 2}
LATENT: dict[str, Any] = EXPERTS | {
    "n_routed_experts": 16, "moe_intermediate_size": 96, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 6, "q_lora_rank": 24, "n_shared_experts": 3, "first_k_dense_replace": 2,
    "routed_scaling_factor": 1.5, "rope_theta": 5e5,
}  # fmt: skip
THETA = {"rope_theta": 5e5}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 64, "sliding_window": 128, "final_logit_softcapping": 20.0}
TOLD: dict[str, dict[str, Any]] = {
    "llama": THETA | {"head_dim": 32},
    "qwen2": THETA,
    "qwen3": THETA | {"head_dim": 32},
    "qwen2_moe": THETA | QWEN_EXPERTS | {"shared_expert_intermediate_size": 160, "qkv_bias": False},
    "qwen3_moe": THETA | QWEN_EXPERTS | {"mlp_only_layers": [0]},
    "mixtral": THETA | {"num_local_experts": 4, "num_experts_per_tok": 3},
    "deepseek_v2": LATENT | {"norm_topk_prob": False},
    "deepseek_v3": LATENT | {"n_group": 4, "topk_group": 2},
    "mistral": THETA | {"head_dim": 32, "sliding_window": 128},
    "phi3": THETA | {"sliding_window": 128, "partial_rotary_factor": 0.75},
    "glm": THETA | {"head_dim": 32, "attention_bias": False, "partial_rotary_factor": 0.75},
    "glm4": THETA | {"head_dim": 32, "attention_bias": False, "partial_rotary_factor": 0.75},
    "gemma2": THETA | GEMMA | {"attn_logit_softcapping": 30.0},
    "gemma3_text": THETA | GEMMA | {"rope_local_base_freq": 2e4, "layer_types": ["full_attention"] * 12},
}
"""What the families read beside SIZES, each at a value that is not its configuration class's."""
THETAS = ("rope_theta", "rope_local_base_freq", "partial_rotary_factor")


def told(family: str) -> dict[str, Any]:
    return {"model_type": family} | SIZES | TOLD[family]


@pytest.mark.parametrize(
    ("family", "key"),
    [(name, key) for name in FAMILIES for key in SIZES | TOLD[name] if key != "num_hidden_layers"],
)
def test_a_key_that_config_json_leaves_out_has_the_configuration_classs_value(family: str, key: str) -> None:
    """The shape without the key is that with Hugging Face's value for it; a size of the model may be asked for."""
    bare = without(told(family), key)
    theirs = transformers.AutoConfig.for_model(**json.loads(json.dumps(bare)))
    rope = theirs.rope_parameters
    value = {key: getattr(theirs, key)} if key not in THETAS else {"rope_parameters": rope}
    try:
        found = FAMILIES[family].shape(bare)
    except ConfigError as error:
        asked = {"num_local_experts": "num_experts"}.get(key, key)
        assert f"{asked} is missing" in str(error) and key not in ("num_key_value_heads", "head_dim")
        return
    assert found == FAMILIES[family].shape(without(bare, *(THETAS if key in THETAS else ())) | value)


@pytest.mark.parametrize("family", FAMILIES)
def test_kv_heads_that_are_not_told_are_the_configuration_classs(family: str, tmp_path: Path) -> None:
    """For the model as for the checks of the layout."""
    bare = without(told(family), "num_key_value_heads")
    theirs = transformers.AutoConfig.for_model(**bare).num_key_value_heads
    has_latent = family.startswith("deepseek")  # all heads have keys of their own, whatever that says
    for config, expected in (
        (bare, 64 if has_latent else theirs), (bare | {"num_key_value_heads": None}, 64),
        (bare | {"num_key_value_heads": 16}, 64 if has_latent else 16),
    ):  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert FAMILIES[family].shape(config).num_kv_heads == expected
        if not has_latent:
            assert read_model_facts(str(tmp_path)).num_kv_heads == expected


def test_kv_heads_of_a_model_of_mistrals_size() -> None:
    """As Mistral 7B has them: 32 heads, and 8 KV heads where config.json is silent."""
    bare = without(LLAMA, "num_key_value_heads") | {"model_type": "mistral"}
    assert FAMILIES["mistral"].shape(bare).num_kv_heads == 8


@pytest.mark.parametrize(
    ("family", "setting", "words"),
    [
        ("llama", {"attention_bias": True}, "attention_bias is True"),
        ("llama", {"mlp_bias": True}, "mlp_bias is True"),
        ("llama", {"hidden_act": "gelu"}, "supported: 'silu'"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn' is not supported"),
        ("llama", {"num_attention_heads": 30}, "no multiple of num_key_value_heads 8"),
        ("llama", {"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ("mistral", {"sliding_window": 0}, "sliding_window is 0; it has to be at least 1"),
        ("mistral", {"layer_types": ["sliding_attention"]}, "layer_types is"),
        ("mistral", {"attention_bias": True}, "attention_bias is True"),
        ("phi3", {"rope_scaling": {"type": "longrope", "factor": 4.0}}, "'longrope' is not supported"),
        ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop is 0.1"),
        ("glm", {"hidden_act": "gelu"}, "supported: 'silu'"),
        ("gemma2", {"hidden_activation": "gelu"}, "supported: 'gelu_pytorch_tanh'"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gemma2", {"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries for 16 layers"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "'linear' is not supported"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_scaling": LLAMA3_ROPE},
            "are both there and differ",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {"rope_theta": 5e5}}, "rope_scaling": LLAMA3_ROPE},
            "are both there and differ",
        ),
        ("gemma3_text", {"rope_parameters": {"sliding_attention": LLAMA3_ROPE}}, "of sliding layers is not supported"),
        ("gemma3_text", {"layer_types": ["chunked_attention"] * 16}, "16 layers, chunked_attention; supported"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("qwen3", {"attention_bias": True}, "attention_bias is True"),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias is True"),
        ("qwen3_moe", {}, "num_experts is missing"),
        ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 9}, "9 is more than the 8 experts"),
        ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 1, "norm_topk_prob": True}, "would not learn"),
        ("qwen2_moe", {}, "shared_expert_intermediate_size is missing"),
    ],
)
def test_what_the_layers_do_not_compute_is_refused(
    tmp_path: Path, family: str, setting: dict[str, Any], words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"model_type": family} | setting))
    with pytest.raises(ConfigError, match=words) as caught:
        read_model(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_folders_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such folder"):
        read_model(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"no config\.json"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(
        ConfigError, match=r"'gpt2'; supported: deepseek_v2, deepseek_v3, gemma2, .*, llama, .*, qwen3_moe$"
    ):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text('{\n"model_type" "llama"}')
    with pytest.raises(DataError, match=r"config\.json:2"):
        read_model(tmp_path)


def test_windows_that_hide_nothing_are_none() -> None:
    def read(family: str, **settings: Any) -> tuple[int | None, list[int]]:
        shape = FAMILIES[family].shape(LLAMA | {"model_type": family, "num_hidden_layers": 6} | settings)
        return shape.window, sorted(shape.local_layers)

    every = list(range(6))
    assert read("mistral") == (4096, every)  # the configuration class's value
    assert read("mistral", sliding_window=None) == (None, every)
    assert read("mistral", sliding_window=131071) == (131071, every)
    assert read("mistral", sliding_window=131072) == (None, every)  # a query sees all positions that there are
    assert read("phi3", sliding_window=2047) == (2047, every) and read("phi3") == (None, every)
    assert read("gemma2") == (4096, [0, 2, 4])
    assert read("gemma3_text", sliding_window=512) == (512, [0, 1, 2, 3, 4])
    assert read("gemma3_text", sliding_window_pattern=3) == (4096, [0, 1, 3, 4])
    kinds = ["full_attention", "sliding_attention"] * 3
    assert read("gemma3_text", layer_types=kinds) == (4096, [1, 3, 5])


def test_partial_rope_of_both_ways_of_writing() -> None:
    glm = FAMILIES["glm"].shape(LLAMA)
    assert (glm.rotary_percent, glm.rotary_interleaved, glm.head_dim, glm.qkv_bias) == (0.5, True, 128, True)
    assert FAMILIES["glm4"].shape(LLAMA | {"partial_rotary_factor": 0.25}).rotary_percent == 0.25
    nested = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.75}}
    phi = FAMILIES["phi3"].shape(LLAMA | nested)
    assert (phi.rotary_percent, phi.rope_theta, phi.rotary_interleaved) == (0.75, 5e5, False)
    assert FAMILIES["phi3"].shape(LLAMA).rotary_percent == 1.0


def test_gemma_reads_caps_scales_and_two_ropes() -> None:
    gemma2 = FAMILIES["gemma2"].shape(LLAMA)
    assert (gemma2.attention_softcap, gemma2.logit_softcap, gemma2.softmax_scale) == (50.0, 30.0, 1 / 16)
    off = FAMILIES["gemma2"].shape(LLAMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert (off.attention_softcap, off.logit_softcap) == (None, None)
    # As google/gemma-3-1b-it has them, and as transformers 5 saves them.
    before = FAMILIES["gemma3_text"].shape(LLAMA | {"rope_theta": 1e6, "rope_local_base_freq": 10000})
    nested = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}}
    assert before == FAMILIES["gemma3_text"].shape(LLAMA | {"rope_parameters": nested})
    # Both ways scaling is of full layers alone.
    scaled = FAMILIES["gemma3_text"].shape(LLAMA | {"rope_local_base_freq": 10000, "rope_scaling": LLAMA3_ROPE})
    nested["full_attention"] |= LLAMA3_ROPE
    assert scaled == FAMILIES["gemma3_text"].shape(LLAMA | {"rope_parameters": nested})
    assert scaled == replace(before, rope_scaling=Llama3RopeScaling(32.0, 1.0, 4.0, 8192))
    assert (before.rope_theta, before.local_rope_theta, before.logit_softcap, before.head_dim) == (1e6, 1e4, None, 256)
    assert before.qk_norm and before.zero_centered_norms and before.residual_norms and before.tied
    assert before.embedding_scale == 2048**0.5 and before.activation == "gelu_tanh"


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "glm4"])
def test_transformer_engine_is_refused_where_layers_are_torch_alone(family: str) -> None:
    from megappo.models.spec import block_spec

    assert FAMILIES[family].shape(LLAMA).needs_torch_layers
    assert not FAMILIES["glm"].shape(LLAMA).needs_torch_layers
    with pytest.raises(ConfigError, match=r"model\.layers: 'te', but this family's"):
        block_spec("te", "grouped", FAMILIES[family].shape(LLAMA), [0], dtype=torch.bfloat16)


def test_auto_takes_transformer_engine_in_16_bits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It rounds float32 matrices to TF32."""
    from megappo.models import spec

    plain, gemma = FAMILIES["glm"].shape(LLAMA), FAMILIES["gemma2"].shape(LLAMA)
    assert not spec.takes_te("auto", plain, torch.bfloat16)  # it is not here
    monkeypatch.setattr(spec.runtime, "has_transformer_engine", lambda: True)
    assert spec.takes_te("auto", plain, torch.bfloat16)
    assert not spec.takes_te("auto", plain, torch.float32)
    assert spec.takes_te("te", plain, torch.float32)
    assert not spec.takes_te("torch", plain, torch.bfloat16)
    assert not spec.takes_te("auto", gemma, torch.bfloat16)


def test_layouts_that_do_not_divide_experts() -> None:
    shape = FAMILIES["qwen2_moe"].shape(MOE | {"shared_expert_intermediate_size": 1026})
    check_layout(shape, LayoutConfig(tp=2, ep=4, etp=3))
    with pytest.raises(ConfigError, match=r"layout\.ep: 3 does not .* 8 experts; possible: 1, 2, 4, 8$"):
        check_layout(shape, LayoutConfig(ep=3))
    with pytest.raises(ConfigError, match=r"layout\.etp: 5 does not .* 768 rows of an expert; possible"):
        check_layout(shape, LayoutConfig(etp=5))
    # The shared expert is cut over TP; a dense feed-forward part is in no layer.
    with pytest.raises(ConfigError, match=r"layout\.tp: 4 .* and 1026 feed-forward rows; possible: 1, 2$"):
        check_layout(shape, LayoutConfig(tp=4))


MOE: dict[str, Any] = LLAMA | {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768, "shared_expert_intermediate_size": 1024,
}  # fmt: skip


def test_sizes_of_experts() -> None:
    routed = FAMILIES["qwen3_moe"].shape(MOE | {"norm_topk_prob": True})
    assert routed.qk_norm and not routed.qkv_bias
    assert routed.moe == MoeShape(num_experts=8, top_k=2, ffn_size=768, norm_topk_prob=True)
    shared = FAMILIES["qwen2_moe"].shape(MOE)
    assert shared.qkv_bias and not shared.qk_norm
    assert shared.moe == MoeShape(8, 2, 768, shared_ffn_size=1024, has_shared_gate=True, norm_topk_prob=False)
    # transformers 5 writes another key.
    renamed = {"num_local_experts": 8} | {key: value for key, value in MOE.items() if key != "num_experts"}
    assert FAMILIES["qwen3_moe"].shape(renamed).moe == FAMILIES["qwen3_moe"].shape(MOE).moe


def test_layers_without_experts() -> None:
    def dense(**settings: Any) -> list[int]:
        shape = FAMILIES["qwen3_moe"].shape(MOE | {"num_hidden_layers": 6} | settings)
        assert shape.moe is not None
        return sorted(shape.moe.dense_layers)

    assert dense() == []
    assert dense(mlp_only_layers=[0, 4]) == [0, 4]
    assert dense(decoder_sparse_step=2) == [0, 2, 4]
    assert dense(decoder_sparse_step=3, mlp_only_layers=[5]) == [0, 1, 3, 4, 5]


DEEPSEEK = {
    "num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 128,
    "max_position_embeddings": 64, "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4,
    "moe_intermediate_size": 16,
    "topk_group": 2, "first_k_dense_replace": 1, "n_shared_experts": 2, "routed_scaling_factor": 2.5,
}  # fmt: skip


def test_routers_of_deepseek() -> None:
    third, second = FAMILIES["deepseek_v3"].shape(DEEPSEEK).moe, FAMILIES["deepseek_v2"].shape(DEEPSEEK).moe
    assert third is not None and second is not None
    assert (third.score, third.has_bias, third.norm_topk_prob, third.scaling) == ("sigmoid", True, True, 2.5)
    assert (third.num_groups, third.top_groups, third.best_of_group, third.shared_ffn_size) == (4, 2, 2, 32)
    assert (second.score, second.has_bias, second.norm_topk_prob, second.num_groups) == ("softmax", False, False, 1)
    limited = FAMILIES["deepseek_v2"].shape(DEEPSEEK | {"topk_method": "group_limited_greedy"}).moe
    assert limited is not None and (limited.num_groups, limited.top_groups, limited.best_of_group) == (4, 2, 1)


BARE_DEEPSEEK = without(
    DEEPSEEK | {"n_routed_experts": 16},
    "q_lora_rank", "n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "routed_scaling_factor",
)  # fmt: skip


@pytest.mark.parametrize(
    "told",
    [
        {}, {"n_group": 4}, {"topk_group": 3}, {"n_group": 4, "topk_group": 2}, {"n_shared_experts": 3},
        {"first_k_dense_replace": 0}, {"routed_scaling_factor": 1.5}, {"q_lora_rank": None}, {"norm_topk_prob": False},
    ],
)  # fmt: skip
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_what_config_json_does_not_say_of_deepseek_is_as_in_hugging_faces_class(
    family: str, told: dict[str, Any]
) -> None:
    config = BARE_DEEPSEEK | {"model_type": family} | told
    theirs, shape = transformers.AutoConfig.for_model(**config), FAMILIES[family].shape(config)
    assert shape.moe is not None and shape.latent is not None
    assert shape.latent.q_rank == theirs.q_lora_rank
    groups = (theirs.n_group, theirs.topk_group) if family == "deepseek_v3" else (1, 1)  # V2's method is greedy
    assert (shape.moe.num_groups, shape.moe.top_groups) == groups
    assert (shape.moe.scaling, shape.moe.norm_topk_prob) == (theirs.routed_scaling_factor, theirs.norm_topk_prob)
    assert shape.moe.shared_ffn_size == theirs.n_shared_experts * theirs.moe_intermediate_size
    assert shape.moe.dense_layers == frozenset(range(theirs.first_k_dense_replace))


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_what_config_json_does_not_say_of_other_experts_is_as_in_hugging_faces_class(family: str) -> None:
    config = without(MOE, "tie_word_embeddings", "hidden_act") | {"model_type": family, "num_local_experts": 8}
    theirs, shape = transformers.AutoConfig.for_model(**config), FAMILIES[family].shape(config)
    assert shape.moe is not None
    # Mixtral's class has no such switch, and its router always divides.
    assert shape.moe.norm_topk_prob == getattr(theirs, "norm_topk_prob", True)
    assert getattr(theirs, "decoder_sparse_step", 1) == 1 and not getattr(theirs, "mlp_only_layers", [])
    assert shape.moe.dense_layers == frozenset() and shape.moe.scaling == 1.0
    assert shape.tied == theirs.tie_word_embeddings and shape.qkv_bias == getattr(theirs, "qkv_bias", False)


def test_the_published_deepseek_chooses_experts_as_hugging_faces_class_does() -> None:
    config = dict(PUBLISHED["deepseek-v3"])
    theirs, moe = transformers.DeepseekV3Config(), FAMILIES["deepseek_v3"].shape(config).moe
    assert moe is not None
    for key in ("n_group", "topk_group", "routed_scaling_factor", "norm_topk_prob", "first_k_dense_replace"):
        assert config[key] == getattr(theirs, key)
    assert (moe.num_groups, moe.top_groups, moe.scaling, moe.norm_topk_prob, moe.score) == (8, 4, 2.5, True, "sigmoid")


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("deepseek_v3", {"n_group": 3}, "n_routed_experts 8 are not n_group 3 equal groups of at least 2; give"),
        ("deepseek_v3", {"n_group": 8}, "n_routed_experts 8 are not n_group 8 equal groups of at least 2; give"),
        ("deepseek_v3", {"topk_group": 5}, "topk_group 5 is none of 1 to n_group 4"),
        ("deepseek_v3", {"n_group": None}, "n_group is missing"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy", "topk_group": 0}, "topk_group 0 is none of 1 to"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "supported: 'greedy', 'group_limited_greedy'"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is True"),
        ("deepseek_v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05"),
        ("deepseek_v3", {"rope_scaling": {"type": "linear", "factor": 2}}, "supported: 'default', 'yarn'"),
        ("mixtral", {"sliding_window": 4096}, "sliding_window is 4096"),
    ],
)
def test_what_deepseek_and_mixtral_are_refused_for(family: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FAMILIES[family].shape(DEEPSEEK | settings)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    "mscales",
    [
        {},
        {"mscale": 1.0},
        {"mscale": None, "mscale_all_dim": None},
        {"mscale": 1.0, "mscale_all_dim": 0},
        {"mscale": 0.707, "mscale_all_dim": 0.707},
        {"mscale": 0.5, "mscale_all_dim": 2.0},
    ],
)
def test_yarn_multiplies_rope_as_hugging_face_does(mscales: dict[str, Any]) -> None:
    """By Megatron's quotient of the two factors."""
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = DEEPSEEK | {"model_type": "deepseek_v3", "rope_parameters": YARN | mscales}
    latent = FAMILIES["deepseek_v3"].shape(config).latent
    assert latent is not None and latent.yarn is not None
    yarn = latent.yarn
    theirs = transformers.AutoConfig.for_model(**json.loads(json.dumps(config)))
    _, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
    assert _yarn_get_concentration_factor(yarn.factor, yarn.mscale, yarn.mscale_all_dim) == pytest.approx(factor)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"mscale": 0.7}, "mscale 0.7 and mscale_all_dim None is not supported.*; give both, or neither"),
        ({"mscale_all_dim": 1.0}, "mscale None and mscale_all_dim 1.0 is not supported"),
        ({"mscale": 0}, "mscale 0 and mscale_all_dim None is not supported"),
        ({"attention_factor": 1.0}, "attention_factor 1.0 is not supported.*; take it out"),
        ({"truncate": False}, "truncate False is not supported"),
    ],
)
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_yarn_that_readers_compute_differently_is_refused(family: str, setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FAMILIES[family].shape(DEEPSEEK | {"model_type": family, "rope_scaling": YARN | setting})


def test_layouts_that_do_not_divide_the_model() -> None:
    # SmolLM2-135M: 9 heads, 3 KV heads, 30 layers.
    sizes = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576, "intermediate_size": 1536}
    smol = FAMILIES["llama"].shape(LLAMA | sizes | {"num_hidden_layers": 30})
    check_layout(smol, LayoutConfig(tp=3, pp=5))
    with pytest.raises(ConfigError, match=r"layout\.tp: 2 .* possible: 1, 3$"):
        check_layout(smol, LayoutConfig(tp=2))
    with pytest.raises(ConfigError, match=r"layout\.pp: 4 .* possible: 1, 2, 3, 5, 6, 10, 15, 30$"):
        check_layout(smol, LayoutConfig(pp=4))


@pytest.mark.parametrize("scaling", [LLAMA3_ROPE, {"type": "default"}])
def test_scaling_that_is_written_twice_alike_is_read(scaling: dict[str, Any]) -> None:
    """Old files call the kind `type`."""
    parameters = {key: value for key, value in scaling.items() if key != "type"} | {"rope_theta": 5e5}
    twice = FAMILIES["llama"].shape(LLAMA | {"rope_parameters": parameters, "rope_scaling": scaling})
    assert twice == FAMILIES["llama"].shape(LLAMA | {"rope_parameters": parameters})


def test_theta_where_config_json_names_none_is_hugging_faces() -> None:
    keys = {"num_local_experts": 4, "num_experts_per_tok": 2}
    for name, made in (("mixtral", transformers.MixtralConfig), ("llama", transformers.LlamaConfig)):
        theta = made(**LLAMA | keys).rope_parameters["rope_theta"]
        assert FAMILIES[name].shape(LLAMA | keys).rope_theta == theta
    assert FAMILIES["mixtral"].shape(LLAMA | keys | {"rope_theta": 5e5}).rope_theta == 5e5
    assert FAMILIES["mixtral"].shape(LLAMA | keys | {"rope_parameters": {"rope_theta": 7e5}}).rope_theta == 7e5


def ropes(family: str) -> list[tuple[str, dict[str, Any]]]:
    """Both names of the keys of RoPE with each kind that the family has; Gemma 3's `rope_parameters` are nested."""
    names = ["rope_scaling"] if family == "gemma3_text" else ["rope_scaling", "rope_parameters"]
    kinds: list[dict[str, Any]] = [{}, {"rope_type": "default"}, {"type": "default"}]
    if family not in ("deepseek_v2", "deepseek_v3", "phi3"):
        kinds.append(LLAMA3_ROPE)
    return [(name, kind) for name in names for kind in kinds]


@pytest.mark.parametrize(
    ("family", "key", "rope"), [(family, *written) for family in sorted(FAMILIES) for written in ropes(family)]
)
def test_theta_and_rotary_factor_among_the_keys_of_rope_are_hugging_faces(
    family: str, key: str, rope: dict[str, Any]
) -> None:
    """They count before those beside, whichever name the keys have."""
    factor = {"partial_rotary_factor": 0.25} if family in ("glm", "glm4", "phi3") else {}
    beside = {"rope_theta": 20000.0} | dict.fromkeys(factor, 0.75)
    sizes = DEEPSEEK if family.startswith("deepseek") else MOE | {"num_local_experts": 8}
    config = sizes | {"model_type": family, "pad_token_id": 0} | beside
    inside = config | {key: rope | {"rope_theta": 5e5} | factor}
    for written in (inside, config | {key: dict(rope)}, config):
        theirs = transformers.AutoConfig.for_model(**json.loads(json.dumps(written))).rope_parameters
        theirs = theirs.get("full_attention", theirs)
        ours = FAMILIES[family].shape(written)
        assert ours.rope_theta == theirs["rope_theta"]
        assert not factor or ours.rotary_percent == theirs["partial_rotary_factor"]
        assert (ours.rope_scaling is not None) == (theirs["rope_type"] == "llama3")
    assert FAMILIES[family].shape(inside).rope_theta == 5e5
