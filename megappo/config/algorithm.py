"""Section `algorithm`: the advantage estimator, the KL penalty in the reward, the correction of rollout log-probs."""

from typing import Literal

from pydantic import Field

from megappo.config.actor import KLEstimator
from megappo.config.base import Section
from megappo.config.filter_groups import FilterGroupsConfig


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


AdvEstimator = Literal["gae", "vapo", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax"]
WITH_CRITIC: tuple[AdvEstimator, ...] = ("gae", "vapo")
WITH_GROUPS: tuple[AdvEstimator, ...] = ("grpo", "rloo", "reinforce_plus_plus_baseline")
"""Estimators that compare the responses to one prompt with each other."""
WHITENED: tuple[AdvEstimator, ...] = (*WITH_CRITIC, "reinforce_plus_plus", "reinforce_plus_plus_baseline")
VAPO_LENGTH_ALPHA = 0.05


class RolloutCorrectionConfig(Section):
    """Against the difference between the engine's log-probs and the trainer's (docs/semantics.md)."""

    rollout_is: Literal["token", "sequence", "icepop"] | None = None
    """Weigh the policy loss by truncated importance weights of each token or of the whole sequence, or leave out tokens
    whose weight is outside a range (`icepop`); null does nothing."""
    rollout_is_threshold: float = Field(2.0, gt=0)
    """Largest weight of `token` and `sequence`."""
    icepop_low: float = Field(0.5, ge=0)
    """`icepop` keeps tokens whose weight is at least this."""
    icepop_high: float = Field(5.0, gt=0)
    """`icepop` keeps tokens whose weight is at most this."""
    bypass_mode: bool = False
    """Take the engine's log-probs for the old ones, and leave out the pass that computes those."""


class AlgorithmConfig(Section):
    """From scores to advantages."""

    adv_estimator: AdvEstimator = "gae"
    """The advantage estimator. `gae` and `vapo` (GAE with a λ for long responses) have a critic, the others none."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount of a response token."""
    lam: float = Field(1.0, ge=0, le=1)
    """GAE's λ, where the next two don't say otherwise."""
    lam_actor: float | None = Field(None, ge=0, le=1)
    """λ of the advantages; `lam` when null."""
    lam_critic: float | None = Field(None, ge=0, le=1)
    """λ of the returns; `lam` when null (1 for `vapo`)."""
    lam_length_alpha: float | None = Field(None, gt=0)
    """λ of the advantages is 1 − 1 / (this · response length), at least 0; null leaves it constant (0.05 for
    `vapo`)."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide `grpo`'s advantages by the standard deviation of the group's scores."""
    normalize_scores: bool = False
    """Give the scores of the step's sequences mean 0 and unit variance before they become rewards of tokens."""
    whiten_advantages: bool | None = None
    """Give the advantages of the global batch mean 0 and unit variance; null does it where the estimator is defined so:
    `gae`, `vapo` and both of `reinforce_plus_plus`."""
    use_kl_in_reward: bool = False
    """Take β · KL to the reference policy off the reward of each token."""
    kl_penalty: KLEstimator = "kl"
    """The estimator of that KL."""
    kl_ctrl: KLControlConfig = KLControlConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()

    @property
    def needs_critic(self) -> bool:
        return self.adv_estimator in WITH_CRITIC

    @property
    def whitens(self) -> bool:
        return self.adv_estimator in WHITENED if self.whiten_advantages is None else self.whiten_advantages

    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
