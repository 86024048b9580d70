"""Section `dpo`: learning from preference pairs without a reward model."""

from typing import Literal

from pydantic import Field

from megappo.config.base import Section


class DPOConfig(Section):
    """Direct preference optimisation, of `trainer.kind: dpo`."""

    beta: float = Field(0.1, gt=0)
    """Strength of the pull towards the reference; implicit rewards are β · (log π − log π_ref)."""
    loss_type: Literal["sigmoid", "ipo"] = "sigmoid"
    """DPO's logistic loss, or IPO's squared one."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Share of pairs whose labels are taken to be wrong (`sigmoid` only)."""
