"""Section `algorithm`: the advantage estimator and the KL penalty in the reward."""

from typing import Literal

from pydantic import Field

from megappo.config.actor import KLEstimator
from megappo.config.base import Section


class KLControlConfig(Section):
    """The controller of the reward's KL coefficient."""

    type: Literal["fixed", "adaptive"] = "fixed"
    kl_coef: float = Field(0.001, ge=0)
    target_kl: float = Field(0.01, gt=0)
    horizon: int = Field(10000, gt=0)
    """Sequences over which the adaptive coefficient reacts."""


class AlgorithmConfig(Section):
    """From scores to advantages."""

    adv_estimator: Literal["gae"] = "gae"
    gamma: float = Field(1.0, ge=0, le=1)
    lam: float = Field(1.0, ge=0, le=1)
    whiten_advantages: bool = True
    """Give the advantages of the global batch mean 0 and unit variance."""
    use_kl_in_reward: bool = False
    kl_penalty: KLEstimator = "kl"
    kl_ctrl: KLControlConfig = KLControlConfig()
