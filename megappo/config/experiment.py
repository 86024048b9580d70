"""The experiment: all sections in one frozen tree. Loading is in `load.py`, rules across sections in `checks.py`."""

from megappo.config.actor import ActorConfig, CriticConfig, RefConfig
from megappo.config.algorithm import AlgorithmConfig
from megappo.config.base import Section
from megappo.config.data import DataConfig
from megappo.config.hybrid import HybridConfig
from megappo.config.layout import LayoutConfig
from megappo.config.model import ModelConfig
from megappo.config.observe import ObserveConfig
from megappo.config.preferences import DPOConfig
from megappo.config.replay import ReplayConfig
from megappo.config.reward import RewardConfig
from megappo.config.rollout import RolloutConfig
from megappo.config.trainer import TrainerConfig


class ExperimentConfig(Section):
    """One experiment file, resolved."""

    model: ModelConfig
    actor: ActorConfig = ActorConfig()
    critic: CriticConfig = CriticConfig()
    ref: RefConfig = RefConfig()
    reward: RewardConfig | None = None
    """Needed by PPO; otherwise it scores the answers to held-out prompts."""
    rollout: RolloutConfig = RolloutConfig()
    hybrid: HybridConfig = HybridConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    replay: ReplayConfig = ReplayConfig()
    dpo: DPOConfig = DPOConfig()
    data: DataConfig
    layout: LayoutConfig = LayoutConfig()
    trainer: TrainerConfig
    observe: ObserveConfig = ObserveConfig()

    @property
    def needs_reference(self) -> bool:
        """Whether any term of the experiment reads reference log-probs."""
        return self.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def has_reference(self) -> bool:
        """Whether the run computes reference log-probs: DPO always, PPO for a KL term."""
        return self.trainer.kind == "dpo" or (self.trainer.kind == "ppo" and self.needs_reference)

    @property
    def reference_is_actor(self) -> bool:
        """Whether the reference is the actor with its adapters off, not a model of its own."""
        return self.model.lora.is_used and self.ref.path is None

    @property
    def needs_critic(self) -> bool:
        """Whether a critic is built: the advantage estimator reads values."""
        return self.algorithm.needs_critic

    @property
    def critic_is_dynamic(self) -> bool:
        """Whether the critic's micro-batches are cut by tokens."""
        own = self.critic.use_dynamic_bsz
        return self.actor.use_dynamic_bsz if own is None else own

    @property
    def reference_is_dynamic(self) -> bool:
        """Whether the reference's micro-batches are cut by tokens."""
        own = self.ref.log_prob_use_dynamic_bsz
        return self.actor.use_dynamic_bsz if own is None else own

    @property
    def needs_exact_kl(self) -> bool:
        """Whether actor and reference have to compute logits of the same micro-batch."""
        actor, algorithm = self.actor, self.algorithm
        in_loss = actor.use_kl_loss and actor.kl_loss_type == "full"
        return in_loss or (algorithm.use_kl_in_reward and algorithm.kl_penalty == "full")

    @property
    def generation_tp(self) -> int:
        """Tensor parallel size of a replica that has a layout of its own."""
        return self.rollout.tensor_model_parallel_size or self.layout.tp

    @property
    def generates_in_own_layout(self) -> bool:
        """Whether the native engine needs other shards than training's: it spreads its own way the experts that
        data-parallel ranks share, and replicas of a given size have no pipeline stages."""
        size, layout = self.rollout.tensor_model_parallel_size, self.layout
        are_shared = layout.ep > 1 or layout.tp % layout.expert_tp > 0
        return are_shared or (size is not None and (size != layout.tp or layout.pp > 1))

    @property
    def max_length(self) -> int:
        """Longest sequence, prompt and response together, in tokens."""
        return self.data.max_prompt_length + self.data.max_response_length
