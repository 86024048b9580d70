"""Section `algorithm`: the advantage estimator and the KL penalty in the reward."""

from typing import Literal

from pydantic import Field

from megappo.config.actor import KLEstimator
from megappo.config.base import Section


class KLControlConfig(Section):
    """The controller of the reward's KL coefficient."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """Keep the coefficient, or drive the KL towards `target_kl`."""
    kl_coef: float = Field(0.001, ge=0)
    """The coefficient β, at first where it is adaptive."""
    target_kl: float = Field(0.01, gt=0)
    """The KL that the adaptive coefficient aims at, in nats a token."""
    horizon: int = Field(10000, gt=0)
    """Sequences over which the adaptive coefficient reacts."""


class AlgorithmConfig(Section):
    """From scores to advantages."""

    adv_estimator: Literal["gae"] = "gae"
    """The advantage estimator: generalised advantage estimation with a critic."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount of a response token."""
    lam: float = Field(1.0, ge=0, le=1)
    """GAE's λ."""
    whiten_advantages: bool = True
    """Give the advantages of the global batch mean 0 and unit variance."""
    use_kl_in_reward: bool = False
    """Take β · KL to the reference policy off the reward of each token."""
    kl_penalty: KLEstimator = "kl"
    """The estimator of that KL."""
    kl_ctrl: KLControlConfig = KLControlConfig()
