"""Sections `actor`, `critic` and `ref`: what each role is trained with, and how its batches are cut."""

from typing import Literal

from pydantic import Field

from megappo.config.base import Section
from megappo.config.fsdp import FsdpConfig, RefFsdpConfig
from megappo.config.lora import LoraConfig
from megappo.config.offload import OffloadConfig, RefOffloadConfig
from megappo.config.optim import CriticOptimConfig, OptimConfig

LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KLEstimator = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full",
    "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+",
]  # fmt: skip
RouterReplay = Literal["off", "old_log_probs", "rollout"]
GSPO_CLIP = (3e-4, 4e-4)
"""Distances of gspo's clip from 1 where none are set: a sequence's ratio, a mean over tokens, moves far less."""


class PolicyLossConfig(Section):
    """The policy loss."""

    loss_mode: Literal["vanilla", "gspo", "cispo"] = "vanilla"
    """`vanilla` is PPO's clipped ratio, `gspo` clips the ratio of the whole sequence, `cispo` clips the weight and
    keeps every token's gradient."""


class ActorConfig(Section):
    """The policy's update."""

    optim: OptimConfig = OptimConfig()
    offload: OffloadConfig = OffloadConfig()
    fsdp: FsdpConfig = FsdpConfig()
    ppo_mini_batch_size: int = Field(64, ge=1)
    """Prompts of one optimizer step; times `rollout.n` gives its sequences."""
    ppo_micro_batch_size_per_gpu: int | None = Field(None, ge=1)
    """Sequences of one forward and backward pass on a rank; 1 when null."""
    log_prob_micro_batch_size_per_gpu: int | None = Field(None, ge=1)
    """Sequences of one forward of the old log-prob pass; `ppo_micro_batch_size_per_gpu` when null."""
    use_dynamic_bsz: bool = False
    """Micro-batches of at most so many tokens (the next two) in place of so many sequences; needs
    `model.use_remove_padding`."""
    ppo_max_token_len_per_gpu: int = Field(16384, ge=1)
    """With `use_dynamic_bsz`: tokens of one forward and backward pass on a rank, at most; at least those of the longest
    sequence."""
    log_prob_max_token_len_per_gpu: int | None = Field(None, ge=1)
    """With `use_dynamic_bsz`: tokens of one forward of the old log-prob pass; `ppo_max_token_len_per_gpu` when null."""
    ppo_epochs: int = Field(1, ge=1)
    """Passes over a step's sequences."""
    target_kl_per_step: float | None = Field(None, gt=0)
    """Leave out the rest of a step's minibatches once one finds the policy farther than this from the one that
    generated (`actor/ppo_kl_k3`, in nats); null takes them all."""
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    clip_ratio: float = Field(0.2, gt=0)
    """PPO's ε on both sides, where the next two don't say otherwise; gspo has 3e-4 and 4e-4 there."""
    clip_ratio_low: float | None = Field(None, gt=0, lt=1)
    """The ratio is clipped below 1 − this; `clip_ratio` when null (3e-4 for gspo)."""
    clip_ratio_high: float | None = Field(None, gt=0)
    """The ratio is clipped above 1 + this; `clip_ratio` when null (4e-4 for gspo)."""
    clip_ratio_c: float = Field(3.0, gt=1)
    """Dual clip: bound of the loss for negative advantages, in units of |advantage|."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How per-token losses become one number: docs/semantics.md. gspo always takes `seq-mean-token-mean`."""
    loss_scale_length: int | None = Field(None, ge=1)
    """Constant length that `seq-mean-token-sum-norm` divides by, the critic's loss too; `data.max_response_length` when
    null."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    entropy_coeff_final: float = 0.0
    """Weight that the bonus has after `entropy_decay_steps`."""
    entropy_decay_steps: int | None = Field(None, ge=1)
    """Optimizer steps over which the weight goes linearly from the first to the last; null keeps the first."""
    entropy_chunk_tokens: int = Field(1024, ge=1)
    """Tokens whose float32 logits exist at once in the log-prob and entropy passes."""
    router_replay: RouterReplay = "off"
    """Of a model with experts, the update sends every token to the experts that it went to in the old log-prob pass
    (`old_log_probs`), or at generation (`rollout`, and so does that pass); `off` lets the router choose anew."""
    use_kl_loss: bool = False
    """Add the KL to the reference policy to the loss."""
    kl_loss_coef: float = Field(0.001, ge=0)
    """Weight of that term."""
    kl_loss_type: KLEstimator = "low_var_kl"
    """Its estimator; a trailing `+` takes the gradient of `k2`. `full` sums over the vocabulary, and runs the reference
    again in every update."""

    @property
    def clip_range(self) -> tuple[float, float]:
        """(low, high) distances of the ratio's clip from 1."""
        both = (self.clip_ratio, self.clip_ratio)
        default_low, default_high = GSPO_CLIP if self.policy_loss.loss_mode == "gspo" else both
        low = default_low if self.clip_ratio_low is None else self.clip_ratio_low
        high = default_high if self.clip_ratio_high is None else self.clip_ratio_high
        return low, high

    @property
    def aggregation(self) -> LossAggMode:
        """The aggregation that the loss takes: its ratio being one a sequence, gspo weighs sequences alike."""
        return "seq-mean-token-mean" if self.policy_loss.loss_mode == "gspo" else self.loss_agg_mode

    def entropy_coeff_at(self, optimizer_step: int) -> float:
        """Weight of the entropy bonus after so many optimizer steps of the run."""
        if self.entropy_decay_steps is None:
            return self.entropy_coeff
        done = min(optimizer_step / self.entropy_decay_steps, 1.0)
        return self.entropy_coeff + done * (self.entropy_coeff_final - self.entropy_coeff)

    @property
    def micro_batch(self) -> int:
        """`ppo_micro_batch_size_per_gpu`, with its default."""
        return self.ppo_micro_batch_size_per_gpu or 1

    @property
    def log_prob_micro_batch(self) -> int:
        return self.log_prob_micro_batch_size_per_gpu or self.micro_batch


class CriticConfig(Section):
    """The value model's update; built only where the advantage estimator needs it."""

    path: str | None = None
    """Hugging Face folder of the starting weights (a language model, or a reward model with `score.weight`); the
    actor's when null."""
    lora: LoraConfig = LoraConfig()
    """The critic's, whose value head is trained too."""
    optim: CriticOptimConfig = CriticOptimConfig()
    offload: OffloadConfig = OffloadConfig()
    fsdp: FsdpConfig = FsdpConfig()
    ppo_mini_batch_size: int | None = Field(None, ge=1)
    """Prompts of one optimizer step; the actor's when null."""
    ppo_micro_batch_size_per_gpu: int | None = Field(None, ge=1)
    """Sequences of one forward and backward pass on a rank; the actor's when null."""
    forward_micro_batch_size_per_gpu: int | None = Field(None, ge=1)
    """Sequences of one forward of the value pass; the update's when null."""
    use_dynamic_bsz: bool | None = None
    """Micro-batches of at most so many tokens, as the actor's; the actor's when null."""
    ppo_max_token_len_per_gpu: int | None = Field(None, ge=1)
    """With dynamic micro-batches: tokens of one forward and backward pass on a rank, at most; the actor's when null."""
    forward_max_token_len_per_gpu: int | None = Field(None, ge=1)
    """With dynamic micro-batches: tokens of one forward of the value pass; the update's when null."""
    ppo_epochs: int | None = Field(None, ge=1)
    """Passes over a step's sequences; the actor's when null."""
    cliprange_value: float = Field(0.5, gt=0)
    """A new value counts as at most this far from the old one, in units of the return."""
    loss_agg_mode: LossAggMode = "token-mean"
    """As the actor's."""


class RefConfig(Section):
    """The frozen reference policy; built only where a KL term needs it."""

    path: str | None = None
    """Hugging Face folder of its weights; the actor's starting weights when null."""
    log_prob_micro_batch_size_per_gpu: int | None = Field(None, ge=1)
    """Sequences of one forward; the actor's when null."""
    offload: RefOffloadConfig = RefOffloadConfig()
    fsdp: RefFsdpConfig = RefFsdpConfig()
    log_prob_use_dynamic_bsz: bool | None = None
    """Micro-batches of at most so many tokens; the actor's `use_dynamic_bsz` when null."""
    log_prob_max_token_len_per_gpu: int | None = Field(None, ge=1)
    """With dynamic micro-batches: tokens of one forward, at most; that of the actor's old log-probs when null."""
