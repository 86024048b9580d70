"""What the native engine can't decode: said before anything runs, in the user's terms."""

from megatron.core.transformer import TransformerConfig

from megappo.errors import ConfigError


def check_model(config: TransformerConfig) -> None:
    """ConfigError where the model or its layout needs more than attention to the whole cached context on TP and PP."""
    unsupported = {
        "context parallelism": config.context_parallel_size > 1,
        "expert parallelism": config.expert_model_parallel_size > 1,
        "virtual pipeline stages": (config.virtual_pipeline_model_parallel_size or 1) > 1,
        "sliding-window attention": config.window_size is not None,
        "multi-latent attention": config.multi_latent_attention,
    }
    for name, is_used in unsupported.items():
        if is_used:
            raise ConfigError(f"rollout.engine: native does not decode with {name}; use a layout or model without it")
