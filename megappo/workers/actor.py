"""The actor: log-probs under the policy of the moment, and the policy's update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from megappo.algorithms.aggregate import Denominators, aggregate
from megappo.algorithms.kl import kl_estimate
from megappo.algorithms.losses import POLICY_LOSSES, ClipRange
from megappo.config.actor import ActorConfig, RouterReplay
from megappo.engines.training import LossTerm, TrainingEngine
from megappo.experience.batch import ExperienceBatch
from megappo.experience.micro import MicroBatch
from megappo.workers.cutting import Cutter
from megappo.workers.policy import LogProbs, global_denominators
from megappo.workers.reference import ReferenceWorker

TokenKL = Callable[[Tensor, Tensor, MicroBatch], Tensor]
"""(logits [b, s, vocab / tp], log-probs [b, s], micro-batch) → KL to the reference of each token [b, s]."""
KLTerm = Callable[[Sequence[MicroBatch]], TokenKL]
"""What has to be known before the actor runs on micro-batches, and then their KL."""


class ActorWorker:
    """Fills `old_log_probs`, and improves the policy on minibatches with advantages.

    `update_cut` and `forward_cut` make the micro-batches of updates and of log-probs. `kl_term` computes the KL of the
    loss (`use_kl_loss`); None leaves it out. `bypass` takes the engine's log-probs for the old ones.
    `has_reference`: the run has one that `kl/mean` is measured to; otherwise that is `actor/ppo_kl`.
    `router_replay`: whose choice of experts the update takes over, and the old log-prob pass where it is the rollout's.
    """

    def __init__(
        self,
        engine: TrainingEngine,
        config: ActorConfig,
        log_probs: LogProbs,
        *,
        scale_length: int,
        update_cut: Cutter,
        forward_cut: Cutter,
        kl_term: KLTerm | None = None,
        bypass: bool = False,
        has_reference: bool = True,
        router_replay: RouterReplay = "off",
    ) -> None:
        self.engine = engine
        self._config = config
        self._log_probs = log_probs
        self._scale_length = scale_length
        self._update_cut = update_cut
        self._forward_cut = forward_cut
        self._kl_term = kl_term
        self._bypass = bypass
        self._has_reference = has_reference
        self._moved = 0.0
        self._router_replay = router_replay
        self._changed: dict[str, float] = {}
        if engine.routing is not None:
            engine.routing.takes_over = router_replay != "off"
            engine.routing.is_complete = not bypass

    def fill_old_log_probs(self, batch: ExperienceBatch) -> ExperienceBatch:
        """Fills `old_log_probs`, and `routed_experts` where router replay wants them for the update."""
        if self._bypass:
            return batch.fill(old_log_probs=batch.rollout_log_probs)
        routing = self.engine.routing
        if routing is None or self._router_replay == "off":
            return batch.fill(old_log_probs=self.log_probs_now(batch))
        routing.shared.reset()
        routing.record()
        cut = self._forward_cut(batch)
        old_log_probs = cut.restored(self.engine.per_token(cut.micros, self._log_probs))
        if self._router_replay == "rollout":
            self._changed = routing.statistics().metrics
        # What the rollout did not record, the router has chosen in this pass.
        return batch.fill(old_log_probs=old_log_probs, routed_experts=cut.restored(routing.recorded()))

    def rollout_metrics(self) -> dict[str, float]:
        """`rollout/router_changed` of the last old log-prob pass, where it took over the engine's choices."""
        return {"rollout/router_changed": self._changed["router_changed"]} if self._changed else {}

    def log_probs_now(self, batch: ExperienceBatch) -> Tensor:
        """[tokens] log-probs of the response tokens under the weights of this moment."""
        cut = self._forward_cut(batch)
        return cut.restored(self.engine.per_token(cut.micros, self._log_probs))

    def within_limit(self, minibatches: Iterable[ExperienceBatch]) -> Iterator[ExperienceBatch]:
        """The minibatches of a step, until an update finds the policy farther than `target_kl_per_step` from the one
        that generated. Every rank stops alike: the distance is that of the global minibatch."""
        self._moved = 0.0
        limit = self._config.target_kl_per_step
        for minibatch in minibatches:
            if limit is not None and self._moved > limit:
                return
            yield minibatch

    def update(self, minibatch: ExperienceBatch) -> dict[str, float]:
        """One optimizer step; returns the metrics `actor/…` of the global minibatch."""
        micros = self._update_cut(minibatch).micros
        entropy_coeff = self._config.entropy_coeff_at(self.engine.optimizer.num_steps)
        loss = ActorLoss(
            self._config, self._log_probs, global_denominators(minibatch, self.engine.mesh), self._scale_length,
            entropy_coeff=entropy_coeff, token_kl=self._kl_term(micros) if self._kl_term is not None else None,
        )  # fmt: skip
        report = self.engine.update(micros, loss)
        self._moved = report.metrics["actor/ppo_kl_k3"]
        metrics = report.metrics | {f"actor/{name}": value for name, value in report.routing.items()}
        metrics |= {"actor/grad_norm": report.grad_norm, "actor/lr": report.learning_rate}
        metrics["actor/micro_batches"] = float(len(micros))
        if not self._has_reference:
            metrics["kl/mean"] = metrics["actor/ppo_kl"]
        if self._config.entropy_decay_steps is not None:
            metrics["actor/entropy_coeff"] = entropy_coeff
        return metrics | ({"actor/kl_loss_coef": self._config.kl_loss_coef} if self._kl_term is not None else {})


def estimated_kl(kind: str) -> KLTerm:
    """The KL term of an estimator from two log-probs; the batch has the reference's."""

    def token_kl(logits: Tensor, log_probs: Tensor, micro: MicroBatch) -> Tensor:
        return kl_estimate(kind, log_probs, micro.view("ref_log_probs"), micro.response_mask)

    return lambda micros: token_kl


def exact_kl(reference: ReferenceWorker) -> KLTerm:
    """The KL term over the whole vocabulary, for which the reference runs on the same micro-batches."""

    def term(micros: Sequence[MicroBatch]) -> TokenKL:
        kl = reference.kl_to(micros)
        return lambda logits, log_probs, micro: kl(logits, micro)

    return term


class ActorLoss:
    """Policy loss − entropy_coeff · entropy + kl_loss_coef · KL, each with global denominators."""

    def __init__(
        self,
        config: ActorConfig,
        log_probs: LogProbs,
        denominators: Denominators,
        scale_length: int,
        *,
        entropy_coeff: float,
        token_kl: TokenKL | None = None,
    ) -> None:
        self._config = config
        self._log_probs = log_probs
        self._denominators = denominators
        self._scale_length = scale_length
        self._entropy_coeff = entropy_coeff
        self._token_kl = token_kl
        self._policy_loss = POLICY_LOSSES[config.policy_loss.loss_mode]
        self._clip = ClipRange(*config.clip_range, dual=config.clip_ratio_c)
        kl = ("actor/kl_loss",) if token_kl is not None else ()
        self.metrics: tuple[str, ...] = (
            "actor/pg_loss", "actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl", "actor/ppo_kl_k3",
            "actor/entropy", *kl,
        )  # fmt: skip

    def __call__(self, output: Tensor, micro: MicroBatch) -> LossTerm:
        """`output` [b, s, vocab / tp] logits."""
        mask = micro.response_mask
        log_probs, entropy = self._log_probs.with_entropy(output, micro)
        terms = self._policy_loss(
            log_probs, micro.view("old_log_probs"), micro.view("advantages"), mask, self._clip, micro.over_sequence
        )
        per_token = terms.per_token
        if micro.rows.loss_weights is not None:
            per_token = per_token * micro.view("loss_weights")
        pg_loss = loss = self._mean(per_token, mask, micro)
        if self._entropy_coeff:
            loss = loss - self._entropy_coeff * self._mean(entropy, mask, micro)
        k3 = torch.expm1(-terms.kl) + terms.kl
        reported = [pg_loss]
        reported += [
            self._token_mean(part, mask) for part in (terms.clipped, terms.dual_clipped, terms.kl, k3, entropy)
        ]
        if self._token_kl is not None:
            kl = self._mean(self._token_kl(output, log_probs, micro), mask, micro)
            loss = loss + self._config.kl_loss_coef * kl
            reported.append(kl)
        return LossTerm(loss, tuple(reported))

    def _mean(self, per_token: Tensor, mask: Tensor, micro: MicroBatch) -> Tensor:
        """This micro-batch's share of the configured global mean."""
        return aggregate(
            per_token, mask, self._config.aggregation, self._denominators, self._scale_length, micro.over_sequence
        )

    def _token_mean(self, per_token: Tensor, mask: Tensor) -> Tensor:
        return aggregate(per_token.float(), mask, "token-mean", self._denominators)
