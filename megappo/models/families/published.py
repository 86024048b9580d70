"""Configurations of published models, as their config.json has them, for planning and benchmarks without a download.

Only what sizes the model: no weights, no tokenizer. `tiny-…` are small ones for tests and CPU benchmarks.
"""

from types import MappingProxyType
from typing import Any

from megappo.models.families.base import HFConfig

_COMMON = {"rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu"}
_TINY = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 1000, "max_position_embeddings": 512, **_COMMON,
}  # fmt: skip
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM",
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1}

_SIZES: dict[str, dict[str, Any]] = {
    "tiny-llama": {"model_type": "llama", "tie_word_embeddings": False, **_TINY},
    "tiny-qwen2": {
        "model_type": "qwen2", "tie_word_embeddings": True, **_TINY, "hidden_size": 256, "num_key_value_heads": 2,
    },
    "tiny-qwen3": {"model_type": "qwen3", "tie_word_embeddings": True, **_TINY},
    "tiny-phi3": {"model_type": "phi3", "tie_word_embeddings": False, **_TINY},
    "tiny-gemma2": {"model_type": "gemma2", **_TINY},
    "tiny-qwen3-moe": {
        "model_type": "qwen3_moe", "tie_word_embeddings": False, **_TINY, **_EXPERTS, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
        "max_position_embeddings": 32768, "tie_word_embeddings": True, **_COMMON,
    },
    "qwen2.5-1.5b": {
        "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936,
        "max_position_embeddings": 32768, "tie_word_embeddings": True, **_COMMON,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
        "max_position_embeddings": 32768, "tie_word_embeddings": False, **_COMMON,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "tie_word_embeddings": False, "num_experts": 128,
        "moe_intermediate_size": 768, **_EXPERTS, **_COMMON,
    },
    "qwen3-235b-a22b": {
        "model_type": "qwen3_moe", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94,
        "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "tie_word_embeddings": False, "num_experts": 128,
        "moe_intermediate_size": 1536, **_EXPERTS, **_COMMON,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280,
        "max_position_embeddings": 163840, "tie_word_embeddings": False, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "norm_topk_prob": True,
        "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", **_COMMON, "rope_theta": 10000.0,
    },
}  # fmt: skip

PUBLISHED: MappingProxyType[str, HFConfig] = MappingProxyType(
    {name: config | {"architectures": [_ARCHITECTURES[config["model_type"]]]} for name, config in _SIZES.items()}
)
