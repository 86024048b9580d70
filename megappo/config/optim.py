"""The optimizer and learning-rate settings that actor and critic share."""

from typing import Literal

from pydantic import Field

from megappo.config.base import Section


class OptimConfig(Section):
    """AdamW through Megatron's optimizer, and its schedule in optimizer steps."""

    lr: float = Field(1e-6, ge=0)
    """Peak learning rate; 0 runs every pass and changes no weight."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's ε, added to the root of the second moment."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay."""
    clip_grad: float = Field(1.0, ge=0)
    """Largest global gradient norm; 0 turns clipping off."""
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    """The course of the learning rate after its warm-up."""
    lr_warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of linear warm-up from 0."""
    lr_decay_steps: int | None = Field(None, ge=1)
    """Optimizer steps until `min_lr_ratio` is reached; null takes all steps of the run."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Final learning rate as a fraction of `lr` (cosine and linear)."""
    use_distributed_optimizer: bool = True
    """Shard optimizer state over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Reduce gradients over the data-parallel ranks bucket by bucket, while the backward pass computes the next."""
    overlap_param_gather: bool = False
    """Gather what other data-parallel ranks stepped bucket by bucket in the next forward pass, while it computes with
    the one before; needs the distributed optimizer and `overlap_grad_reduce`."""
    align_param_gather: bool = False
    """With virtual stages: all pipeline stages begin to gather a chunk at the same time, not each when it needs it."""
    bucket_size: int | None = Field(None, ge=1)
    """With `overlap_grad_reduce`: a bucket is closed when it has so many parameters; null takes Megatron's, 40 million,
    or a million for each data-parallel rank where that is more."""
    grad_reduce_in_fp32: bool = True
    """Add up gradients over micro-batches and ranks in float32; false does it in `model.dtype`."""
    use_precision_aware_optimizer: bool = False
    """Let Transformer Engine's AdamW keep what it needs in the types of the next four settings, beside bfloat16
    parameters; needs the distributed optimizer and a GPU."""
    main_grads_dtype: Literal["float32", "bfloat16"] = "float32"
    """The type of the gradients that the optimizer reads: float32 with `grad_reduce_in_fp32`, bfloat16 without."""
    main_params_dtype: Literal["float32", "float16"] = "float32"
    """The type of the parameters that the optimizer steps; float16 ones have a scale for each tensor."""
    exp_avg_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """The type of AdamW's first moment; float16 ones have a scale for each tensor."""
    exp_avg_sq_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """The type of AdamW's second moment; float16 ones have a scale for each tensor."""


class CriticOptimConfig(OptimConfig):
    """AdamW through Megatron's optimizer, and its schedule in optimizer steps, as the actor's but for the rate."""

    lr: float = Field(1e-5, ge=0)
    """Peak learning rate; 0 runs every pass and changes no weight."""
