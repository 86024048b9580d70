"""What the native engine can't decode: said before anything runs, in the user's terms."""

from megatron.core.transformer import TransformerConfig

from megappo.errors import ConfigError
from megappo.models.families.base import ModelShape


def check_model(config: TransformerConfig) -> None:
    """ConfigError where the model or its layout needs more than attention to the whole cached context on TP and PP."""
    unsupported = {
        "expert parallelism": config.expert_model_parallel_size > 1,
        "experts cut over data-parallel ranks": config.tensor_model_parallel_size
        % (config.expert_tensor_parallel_size or 1)
        > 0,
        "sliding-window attention": config.window_size is not None,
    }
    for name, is_used in unsupported.items():
        if is_used:
            remedy = "vllm, or a layout or model without it"
            raise ConfigError(f"rollout.engine: native does not decode with {name}; use {remedy}")


def check_generation_size(shape: ModelShape, tp: int) -> None:
    """ConfigError, with the sizes that would do, where `tp` ranks can't share the heads, rows and experts evenly."""
    if generation_size_fits(shape, tp):
        return
    others = "" if shape.moe is None else f", {shape.moe.num_experts} experts"
    if shape.latent is not None:
        others += f", {shape.latent.kv_rank + shape.latent.rope_head_dim} and {shape.latent.q_rank or 0} latent rows"
    possible = ", ".join(str(size) for size in range(1, shape.num_heads + 1) if generation_size_fits(shape, size))
    raise ConfigError(
        f"rollout.tensor_model_parallel_size: {tp} does not divide this model's {shape.num_heads} attention heads, "
        f"{shape.num_kv_heads} KV heads (or is no multiple of them), {shape.ffn_size} feed-forward rows{others}; "
        f"possible: {possible}"
    )


def generation_size_fits(shape: ModelShape, tp: int) -> bool:
    """Whether `tp` ranks can share the heads, rows and experts of a model evenly."""
    rows = [shape.num_heads, shape.ffn_size]
    if shape.latent is not None:  # Megatron builds the down projections cut, before they are exchanged
        rows += [shape.latent.kv_rank + shape.latent.rope_head_dim, shape.latent.q_rank or 0]
    if shape.moe is not None:
        rows += [shape.moe.num_experts, shape.moe.shared_ffn_size]
    kv_heads_fit = shape.num_kv_heads % tp == 0 or tp % shape.num_kv_heads == 0
    return kv_heads_fit and all(size % tp == 0 for size in rows)
