"""The tiny models that import, export and log-probs are tested on, and what Hugging Face's own forward says of each."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.tiny_models import FAMILY_NAMES, VARIED_SETTINGS, tiny_model

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip

HALF_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 32,
    "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip

LANGUAGE_MODELS = (
    *FAMILY_NAMES, *VARIED_SETTINGS, "llama_kv1_rope", "qwen2_vocab_131", "qwen3_kv1", "phi3_kv1", "gemma3_kv1_rope",
)  # fmt: skip
"""Cases with logits, float32; the last five have one KV head, or a vocabulary that no TP size divides."""
MOE_MODELS = ("qwen3_moe", "qwen2_moe", "qwen3_moe_dense_layer", "mixtral", "deepseek_v2", "deepseek_v3")
"""Cases with experts: weights of a token's experts that sum to 1; a shared expert, and weights that don't; a layer
without experts."""
MOE_VALUE_MODEL = "qwen3_moe_value"
VALUE_MODEL = "llama_value"
VARIED_VALUE_MODEL = "gemma3_value"
BF16_MODEL = "qwen2_bf16"


def scaled_gemma3() -> dict[str, Any]:
    """Settings of a Gemma 3 with Llama 3's scaling, which Hugging Face's model has in the RoPE of full layers alone."""
    settings = VARIED_SETTINGS["gemma3_text"]
    return settings | {"rope_parameters": settings["rope_parameters"] | {"full_attention": LLAMA3_ROPE}}


def make_models(root: Path) -> None:
    """Writes every case under `root`, and `reference.pt` with Hugging Face's numbers beside each."""
    make: dict[str, Callable[[Path], object]] = {
        "llama": lambda folder: tiny_model(folder, "llama", max_shard_size="20KB"),
        "qwen2": lambda folder: tiny_model(folder, "qwen2", tied=True),
        "qwen3": lambda folder: tiny_model(folder, "qwen3", tied=True, head_dim=16),
        "llama_kv1_rope": lambda folder: tiny_model(folder, "llama", num_kv_heads=1, rope_parameters=LLAMA3_ROPE),
        "qwen2_vocab_131": lambda folder: tiny_model(folder, "qwen2", num_kv_heads=1, tied=True, vocab_size=131),
        "qwen3_kv1": lambda folder: tiny_model(folder, "qwen3", num_kv_heads=1, vocab_size=131),
        "qwen3_moe": lambda folder: tiny_model(folder, "qwen3_moe", norm_topk_prob=True, max_shard_size="20KB"),
        "qwen2_moe": lambda folder: tiny_model(folder, "qwen2_moe", tied=True),
        "qwen3_moe_dense_layer": lambda folder: tiny_model(folder, "qwen3_moe", mlp_only_layers=[0]),
        "mixtral": lambda folder: tiny_model(folder, "mixtral", num_kv_heads=1),
        "deepseek_v2": lambda folder: tiny_model(
            folder, "deepseek_v2", q_lora_rank=None, topk_method="group_limited_greedy"
        ),
        "deepseek_v3": lambda folder: tiny_model(folder, "deepseek_v3", rope_parameters=YARN),
        MOE_VALUE_MODEL: lambda folder: tiny_model(folder, "qwen3_moe", value_head=True, norm_topk_prob=True),
        VALUE_MODEL: lambda folder: tiny_model(folder, "llama", value_head=True),
        "phi3_kv1": lambda folder: tiny_model(
            folder, "phi3", num_kv_heads=1, vocab_size=131, rope_parameters=HALF_ROPE
        ),
        "gemma3_kv1_rope": lambda folder: tiny_model(
            folder, "gemma3_text", **scaled_gemma3() | {"tied": False}, num_kv_heads=1, vocab_size=131
        ),
        VARIED_VALUE_MODEL: lambda folder: tiny_model(
            folder, "gemma3_text", value_head=True, **VARIED_SETTINGS["gemma3_text"]
        ),
        BF16_MODEL: lambda folder: tiny_model(folder, "qwen2", dtype=torch.bfloat16),
    }
    for family, settings in VARIED_SETTINGS.items():
        make[family] = partial(tiny_model, family=family, **settings)
    for name, write in make.items():
        write(root / name)
        if name != BF16_MODEL:
            read = _hf_values if name in (VALUE_MODEL, VARIED_VALUE_MODEL, MOE_VALUE_MODEL) else _hf_log_probs
            torch.save(read(root / name), root / name / "reference.pt")


def tokens() -> Tensor:
    """[3, 24] int64: the input of every case."""
    return torch.randint(0, 128, (3, 24), generator=torch.Generator().manual_seed(7))


@dataclass(frozen=True)
class Reference:
    """What `reference.pt` holds: `[3, 23]` log-prob of each next token, or `[3, 24]` values."""

    numbers: Tensor

    @classmethod
    def read(cls, folder: Path) -> "Reference":
        return cls(torch.load(folder / "reference.pt"))


@torch.no_grad()
def _hf_log_probs(folder: Path) -> Tensor:
    from transformers import AutoModelForCausalLM

    logits = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()(tokens()).logits
    return logits[:, :-1].log_softmax(-1).gather(2, tokens()[:, 1:, None])[..., 0]


@torch.no_grad()
def _hf_values(folder: Path) -> Tensor:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    return model.score(model.model(tokens()).last_hidden_state)[..., 0]
