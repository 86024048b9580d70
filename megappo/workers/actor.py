"""The actor: log-probs under the policy of the moment, and the policy's update."""

from __future__ import annotations

from torch import Tensor

from megappo.algorithms.aggregate import Denominators, aggregate
from megappo.algorithms.kl import kl_estimate
from megappo.algorithms.losses import policy_loss
from megappo.config.actor import ActorConfig
from megappo.engines.training import LossTerm, TrainingEngine
from megappo.experience.batch import ExperienceBatch
from megappo.experience.micro import MicroBatch, micro_batches
from megappo.workers.policy import LogProbs, global_denominators


class ActorWorker:
    """Fills `old_log_probs`, and improves the policy on minibatches with advantages."""

    def __init__(self, engine: TrainingEngine, config: ActorConfig, log_probs: LogProbs, *, scale_length: int) -> None:
        self.engine = engine
        self._config = config
        self._log_probs = log_probs
        self._scale_length = scale_length

    def fill_old_log_probs(self, batch: ExperienceBatch) -> ExperienceBatch:
        micros = self._cut(batch, self._config.log_prob_micro_batch)
        return batch.fill(old_log_probs=self.engine.per_token(micros, self._log_probs))

    def update(self, minibatch: ExperienceBatch) -> dict[str, float]:
        """One optimizer step; returns the metrics `actor/…` of the global minibatch."""
        micros = self._cut(minibatch, self._config.ppo_micro_batch_size_per_gpu)
        denominators = global_denominators(minibatch, self.engine.mesh)
        report = self.engine.update(micros, ActorLoss(self._config, self._log_probs, denominators, self._scale_length))
        metrics = report.metrics | {"actor/grad_norm": report.grad_norm, "actor/lr": report.learning_rate}
        return metrics | ({"actor/kl_loss_coef": self._config.kl_loss_coef} if self._config.use_kl_loss else {})

    def _cut(self, batch: ExperienceBatch, size: int) -> list[MicroBatch]:
        mesh = self.engine.mesh
        return micro_batches(batch, size, alignment=mesh.sequence_alignment, device=mesh.device)


class ActorLoss:
    """Policy loss − entropy_coeff · entropy + kl_loss_coef · KL, each with global denominators."""

    def __init__(self, config: ActorConfig, log_probs: LogProbs, denominators: Denominators, scale_length: int) -> None:
        self._config = config
        self._log_probs = log_probs
        self._denominators = denominators
        self._scale_length = scale_length
        kl = ("actor/kl_loss",) if config.use_kl_loss else ()
        self.metrics: tuple[str, ...] = (
            "actor/pg_loss", "actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl", "actor/entropy", *kl,
        )  # fmt: skip

    def __call__(self, output: Tensor, micro: MicroBatch) -> LossTerm:
        """`output` [b, s, vocab / tp] logits."""
        config, mask = self._config, micro.response_mask
        log_probs, entropy = self._log_probs.with_entropy(output, micro)
        terms = policy_loss(
            log_probs,
            micro.view("old_log_probs"),
            micro.view("advantages"),
            mask,
            clip_low=config.clip_range[0],
            clip_high=config.clip_range[1],
            clip_c=config.clip_ratio_c,
        )
        pg_loss = loss = self._mean(terms.per_token, mask)
        if config.entropy_coeff:
            loss = loss - config.entropy_coeff * self._mean(entropy, mask)
        reported = [pg_loss]
        reported += [self._token_mean(part, mask) for part in (terms.clipped, terms.dual_clipped, terms.kl, entropy)]
        if config.use_kl_loss:
            kl = self._mean(kl_estimate(config.kl_loss_type, log_probs, micro.view("ref_log_probs"), mask), mask)
            loss = loss + config.kl_loss_coef * kl
            reported.append(kl)
        return LossTerm(loss, tuple(reported))

    def _mean(self, per_token: Tensor, mask: Tensor) -> Tensor:
        """This micro-batch's share of the configured global mean."""
        return aggregate(
            per_token, mask, self._config.loss_agg_mode, self._denominators, scale_length=self._scale_length
        )

    def _token_mean(self, per_token: Tensor, mask: Tensor) -> Tensor:
        return aggregate(per_token.float(), mask, "token-mean", self._denominators)
