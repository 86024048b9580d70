"""Reading config.json: shapes that the model cards give, and settings that are refused instead of computed wrongly."""

import json
from pathlib import Path
from typing import Any

import pytest

from megappo.config.layout import LayoutConfig
from megappo.errors import ConfigError, DataError
from megappo.models.architecture import check_layout, read_model
from megappo.models.families import FAMILIES
from megappo.models.families.base import Llama3RopeScaling

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


@pytest.mark.parametrize(
    ("family", "setting", "words"),
    [
        ("llama", {"attention_bias": True}, "attention_bias is True"),
        ("llama", {"mlp_bias": True}, "mlp_bias is True"),
        ("llama", {"hidden_act": "gelu"}, "supported: 'silu'"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn' is not supported"),
        ("llama", {"num_attention_heads": 30}, "no multiple of num_key_value_heads 8"),
        ("llama", {"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("qwen3", {"attention_bias": True}, "attention_bias is True"),
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
    with pytest.raises(ConfigError, match="'gpt2'; supported: llama, qwen2, qwen3"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text('{\n"model_type" "llama"}')
    with pytest.raises(DataError, match=r"config\.json:2"):
        read_model(tmp_path)


def test_layouts_that_do_not_divide_the_model() -> None:
    # SmolLM2-135M: 9 heads, 3 KV heads, 30 layers.
    sizes = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576, "intermediate_size": 1536}
    smol = FAMILIES["llama"].shape(LLAMA | sizes | {"num_hidden_layers": 30})
    check_layout(smol, LayoutConfig(tp=3, pp=5))
    with pytest.raises(ConfigError, match=r"layout\.tp: 2 .* possible: 1, 3$"):
        check_layout(smol, LayoutConfig(tp=2))
    with pytest.raises(ConfigError, match=r"layout\.pp: 4 .* possible: 1, 2, 3, 5, 6, 10, 15, 30$"):
        check_layout(smol, LayoutConfig(pp=4))
