"""Tiny seeded Hugging Face folders of every family, and a small tokenizer, made by transformers, without megappo."""

import os
from pathlib import Path
from typing import Any, Literal

import torch

FamilyName = Literal[
    "llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "mistral", "phi3",
    "glm", "glm4", "gemma2", "gemma3_text",
]  # fmt: skip
FAMILY_NAMES: tuple[FamilyName, ...] = ("llama", "qwen2", "qwen3")
"""The dense families that have nothing but Llama's parts."""

VARIED_SETTINGS: dict[FamilyName, dict[str, Any]] = {
    "mistral": {"sliding_window": 9},
    "phi3": {"sliding_window": 11},
    "glm": {},
    "glm4": {},
    "gemma2": {
        "sliding_window": 7, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 0.8,
        "final_logit_softcapping": 1.5, "tied": True,
    },
    "gemma3_text": {
        "sliding_window": 7, "query_pre_attn_scalar": 12, "final_logit_softcapping": 1.5, "tied": True,
        "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
}  # fmt: skip
"""The dense families with more, and settings that make it count in short sequences. Hugging Face's models of them are
to be loaded with `attn_implementation="eager"`: its other kinds of attention leave out Gemma 2's soft cap."""

# Four experts, of which a token goes to two.
EXPERT_SETTINGS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

# Heads of 8 + 4 numbers, values of 6; eight experts in four groups, of which a token uses two; one dense layer.
LATENT_SETTINGS = {
    "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1, "n_group": 4,
    "topk_group": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
}  # fmt: skip

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tiny_model(
    folder: Path,
    family: FamilyName = "llama",
    *,
    seed: int = 0,
    tied: bool = False,
    vocab_size: int = 128,
    num_layers: int = 2,
    hidden_size: int = 32,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    value_head: bool = False,
    max_shard_size: str = "5GB",
    **settings: Any,
) -> Path:
    """Writes a model whose every weight is random, biases and norms too, so that a misplaced one is seen.

    `value_head` makes a sequence classifier with one label, as reward models are stored. `settings` go to the
    configuration class (`rope_parameters`, …). `vocab_size` must be at least 128 for `tiny_tokenizer`.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    names = {
        "llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen2_moe": "Qwen2Moe", "qwen3_moe": "Qwen3Moe",
        "mistral": "Mistral", "phi3": "Phi3", "glm": "Glm", "glm4": "Glm4", "gemma2": "Gemma2",
        "gemma3_text": "Gemma3Text",
        "mixtral": "Mixtral",
        "deepseek_v2": "DeepseekV2",
        "deepseek_v3": "DeepseekV3",
    }  # fmt: skip
    name = names[family]
    if family.startswith("deepseek"):
        num_kv_heads = num_heads
        settings = LATENT_SETTINGS | settings
    elif not family.startswith("qwen2"):  # Qwen2's head size is hidden_size / heads
        settings["head_dim"] = head_dim or hidden_size // num_heads
    if family.endswith("_moe"):
        settings = EXPERT_SETTINGS | settings
    if family == "mixtral":  # which has no dense size beside
        settings = {"num_local_experts": 4, "num_experts_per_tok": 2} | settings
    if family == "qwen2_moe":
        settings.setdefault("shared_expert_intermediate_size", 24)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        **settings,
    )
    if value_head:
        config.num_labels = 1
    if not value_head:
        name = name.removesuffix("Text")  # Gemma3ForCausalLM is the text model
    model = getattr(transformers, f"{name}For{'SequenceClassification' if value_head else 'CausalLM'}")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in parameter_name else 0.1 * noise)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def tiny_tokenizer(folder: Path, vocab_size: int = 128) -> Path:
    """Writes a character-level tokenizer of printable ASCII with a chat template; ids 0, 1, 2 are pad, bos, eos."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    words = ["<pad>", "<bos>", "<eos>", "<unk>", *characters]
    assert vocab_size >= len(words), f"the tokenizer has {len(words)} tokens, vocab_size is {vocab_size}"
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return folder
