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
