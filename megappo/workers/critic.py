"""The critic: values of the states before response tokens, and their update."""

from __future__ import annotations

import torch
from torch import Tensor

from megappo.algorithms.aggregate import Denominators, aggregate
from megappo.algorithms.losses import value_loss
from megappo.algorithms.masked import keep
from megappo.config.actor import CriticConfig
from megappo.engines.training import LossTerm, TrainingEngine
from megappo.experience.batch import ExperienceBatch
from megappo.experience.micro import MicroBatch
from megappo.workers.cutting import Cutter
from megappo.workers.policy import global_denominators, values_at_tokens

# Relative spread of returns that should be equal and went through float32.
EQUAL = 4 * torch.finfo(torch.float32).eps


class CriticWorker:
    """Fills `values`, and fits them to `returns`."""

    def __init__(
        self,
        engine: TrainingEngine,
        config: CriticConfig,
        *,
        update_cut: Cutter,
        forward_cut: Cutter,
        scale_length: int,
    ) -> None:
        self.engine = engine
        self._config = config
        self._update_cut = update_cut
        self._forward_cut = forward_cut
        self._scale_length = scale_length

    def fill_values(self, batch: ExperienceBatch) -> ExperienceBatch:
        cut = self._forward_cut(batch)
        return batch.fill(values=cut.restored(self.engine.per_token(cut.micros, values_at_tokens)))

    def update(self, minibatch: ExperienceBatch) -> dict[str, float]:
        """One optimizer step; returns the metrics `critic/…` of the global minibatch."""
        micros = self._update_cut(minibatch).micros
        denominators = global_denominators(minibatch, self.engine.mesh)
        report = self.engine.update(micros, CriticLoss(self._config, denominators, self._scale_length))
        metrics = {name: value for name, value in report.metrics.items() if name.startswith("critic/")}
        metrics["critic/vf_explained_var"] = _explained_variance(report.metrics)
        metrics |= {f"critic/{name}": value for name, value in report.routing.items()}
        metrics["critic/micro_batches"] = float(len(micros))
        return metrics | {"critic/grad_norm": report.grad_norm, "critic/lr": report.learning_rate}


class NoCritic:
    """Stands where the advantage estimator reads no values: builds nothing, fills nothing, has no updates to make."""

    def fill_values(self, batch: ExperienceBatch) -> ExperienceBatch:
        return batch

    def update(self, minibatch: ExperienceBatch) -> dict[str, float]:
        raise AssertionError("the batch plan has no epochs for a critic that is not there")


class CriticLoss:
    """½ · the clipped squared error of the values (SEMANTICS: value loss), and what the metrics need."""

    metrics = (
        "critic/vf_loss",
        "critic/vf_clipfrac",
        "critic/vpred_mean",
        "moment/returns",
        "moment/returns_squared",
        "moment/error",
        "moment/error_squared",
    )

    def __init__(self, config: CriticConfig, denominators: Denominators, scale_length: int) -> None:
        self._config = config
        self._denominators = denominators
        self._scale_length = scale_length

    def __call__(self, output: Tensor, micro: MicroBatch) -> LossTerm:
        """`output` [b, s, 1] of the value head."""
        mask, returns = micro.response_mask, micro.view("returns")
        values = values_at_tokens(output, micro)
        terms = value_loss(values, micro.view("values"), returns, mask, self._config.cliprange_value)
        loss = aggregate(
            terms.per_token,
            mask,
            self._config.loss_agg_mode,
            self._denominators,
            self._scale_length,
            micro.over_sequence,
        )

        def token_mean(per_token: Tensor) -> Tensor:
            # float64: a variance is the small difference of two moments.
            return keep(mask, per_token.double()).sum() / max(self._denominators.tokens, 1)

        returns, values = returns.double(), values.detach().double()
        error = returns - values
        moments = (terms.clipped, values, returns, returns**2, error, error**2)
        return LossTerm(loss, (loss, *map(token_mean, moments)))


def _explained_variance(moments: dict[str, float]) -> float:
    """1 − Var(returns − values) / Var(returns) over the response tokens; 0 where returns don't vary beyond rounding."""
    square = moments["moment/returns_squared"]
    variance = square - moments["moment/returns"] ** 2
    residual = moments["moment/error_squared"] - moments["moment/error"] ** 2
    return 1.0 - residual / variance if variance > EQUAL**2 * square else 0.0
