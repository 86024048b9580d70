"""Metrics of a step's experience, over the global batch: rewards, KL, lengths, rollout against trainer log-probs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megappo.engines.rollout import SyncReport
from megappo.experience.batch import ExperienceBatch
from megappo.parallel.collectives import max_over, sum_over
from megappo.parallel.mesh import Mesh
from megappo.rewards.reward import ScoredBatch


@dataclass
class _Reductions:
    """Named means and maxima over all data-parallel ranks, reduced in two collectives."""

    mesh: Mesh
    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def mean(self, name: str, values: Tensor) -> None:
        self.sums[name] = (float(values.double().sum()), float(values.numel()))

    def total(self, name: str, value: float) -> None:
        """A sum; every rank but the first counts nothing in the denominator, which is then 1."""
        self.sums[name] = (value, 1.0 if self.mesh.dp_rank == 0 else 0.0)

    def maximum(self, name: str, values: Tensor) -> None:
        self.maxima[name] = float(values.max()) if values.numel() else float("-inf")

    def minimum(self, name: str, values: Tensor) -> None:
        self.maxima["-" + name] = float((-values).max()) if values.numel() else float("-inf")

    def reduced(self) -> dict[str, float]:
        """Means, maxima and minima over all data-parallel ranks, equal on each. A collective call over them."""
        pairs = sum_over(self.mesh.dp_group, self.mesh.device)(
            torch.tensor(list(self.sums.values()), dtype=torch.float64)
        )
        peaks = max_over(self.mesh.dp_group, self.mesh.device)(
            torch.tensor(list(self.maxima.values()), dtype=torch.float64)
        )
        means = {
            name: (float(total / count) if count else 0.0)
            for name, (total, count) in zip(self.sums, pairs, strict=True)
        }
        for name, peak in zip(self.maxima, peaks.tolist(), strict=True):
            means[name.removeprefix("-")] = -peak if name.startswith("-") else peak
        return means


def sequence_sums(batch: ExperienceBatch, per_token: Tensor) -> Tensor:
    """[B] sums over each sequence's response tokens; what stands at masked places is not read."""
    values = torch.where(batch.response_mask, per_token, 0.0)
    owner = torch.repeat_interleave(torch.arange(batch.num_sequences), batch.lengths)
    return torch.zeros(batch.num_sequences, dtype=torch.float64).index_add(0, owner, values.double())


def sequence_means(batch: ExperienceBatch, per_token: Tensor) -> Tensor:
    """[sequences with a response] means over response tokens."""
    lengths = response_lengths(batch)
    return (sequence_sums(batch, per_token) / lengths.clamp(min=1))[lengths > 0]


def response_lengths(batch: ExperienceBatch) -> Tensor:
    """[B] response tokens of each sequence."""
    return sequence_sums(batch, batch.response_mask.double()).long()


def prompt_lengths(batch: ExperienceBatch) -> Tensor:
    """[B] tokens before each sequence's first response token, all of them where it has none."""
    first = batch.padded(batch.response_mask).int().argmax(dim=1)
    return torch.where(response_lengths(batch) > 0, first, batch.lengths)


def sequence_mean(batch: ExperienceBatch, per_token: Tensor, mesh: Mesh) -> tuple[float, int]:
    """(mean over sequences of the per-sequence mean, number of sequences), over the global batch.

    Sequences without a response have no mean and count only in the number.
    """
    means = sequence_means(batch, per_token)
    local = torch.tensor([float(means.sum()), len(means), batch.num_sequences], dtype=torch.float64)
    total, counted, sequences = sum_over(mesh.dp_group, mesh.device)(local).tolist()
    return (total / counted if counted else 0.0), int(sequences)


def experience_metrics(
    batch: ExperienceBatch, scored: ScoredBatch, kl_taken_off: Tensor, mesh: Mesh, max_response_length: int
) -> dict[str, float]:
    """All metrics of SEMANTICS §8 that describe a step's experience, equal on every rank.

    `kl_taken_off` [tokens] is β · KL, the penalty in the token rewards.
    """
    out = _Reductions(mesh)
    _add_lengths(out, batch, max_response_length)
    _add_rewards(out, batch, scored, kl_taken_off)
    is_measured = batch.old_log_probs is not batch.rollout_log_probs  # in bypass mode they are the same
    if is_measured:
        _add_mismatch(out, batch)
    if batch.loss_weights is not None:
        weights = batch.loss_weights[batch.response_mask]
        out.mean("rollout/is_mean", weights)
        out.minimum("rollout/is_min", weights)
        out.maximum("rollout/is_max", weights)
    if batch.ref_log_probs is not None:
        k1 = sequence_means(batch, batch.get("old_log_probs") - batch.ref_log_probs)
        out.mean("kl/mean", k1)
        out.maximum("kl/max", k1)
    metrics = out.reduced()
    return _with_effective_sample_size(metrics) if is_measured else metrics


def _add_lengths(out: _Reductions, batch: ExperienceBatch, limit: int) -> None:
    responses = response_lengths(batch).double()
    prompts = prompt_lengths(batch).double()
    out.mean("response_length/mean", responses)
    out.total("response_length/total", float(responses.sum()))
    out.maximum("response_length/max", responses)
    out.minimum("response_length/min", responses)
    # The limit counts the tokens of an environment too, which follow the policy's first.
    out.mean("response_length/clip_ratio", (batch.lengths - prompts >= limit).double())
    out.total("response_length/zero", float((responses == 0).sum()))
    out.mean("prompt_length/mean", prompts)
    out.maximum("prompt_length/max", prompts)


def _add_rewards(out: _Reductions, batch: ExperienceBatch, scored: ScoredBatch, kl_taken_off: Tensor) -> None:
    scores = batch.get("scores").double()
    if batch.token_scores is not None:
        scores = scores + sequence_sums(batch, batch.token_scores)
    out.mean("reward/score", scores)
    out.mean("reward/token_reward", sequence_sums(batch, batch.get("token_rewards")))
    out.mean("reward/kl_penalty", sequence_sums(batch, kl_taken_off))
    for name, values in scored.parts.items():
        asked = torch.tensor(values, dtype=torch.float64)
        out.mean(f"reward/parts/{name}", asked[~asked.isnan()])  # NaN: another prompt set's part
    out.total("reward/failed", float(scored.num_failed))


def _add_mismatch(out: _Reductions, batch: ExperienceBatch) -> None:
    """d = old − rollout log-prob on response tokens: |d|, k1, k3 and the weights' moments (SEMANTICS §4)."""
    difference = (batch.get("old_log_probs") - batch.rollout_log_probs)[batch.response_mask].double()
    weights = difference.exp()
    out.mean("rollout/log_prob_diff_mean", difference.abs())
    out.maximum("rollout/log_prob_diff_max", difference.abs())
    out.mean("rollout/k1", -difference)
    out.mean("rollout/k3", weights - 1 - difference)
    out.mean("rollout/weight", weights)
    out.mean("rollout/weight_squared", weights**2)


def _with_effective_sample_size(metrics: dict[str, float]) -> dict[str, float]:
    """Replaces the weights' moments by ESS = (Σw)² / (N Σw²)."""
    weight, squared = metrics.pop("rollout/weight"), metrics.pop("rollout/weight_squared")
    return metrics | {"rollout/ess": weight**2 / squared if squared else 0.0}


def global_tokens(batch: ExperienceBatch, mesh: Mesh) -> int:
    """Tokens of the step's sequences over all data-parallel ranks, prompts included."""
    return int(sum_over(mesh.dp_group, mesh.device)(torch.tensor(batch.num_tokens)))


SUMS_OF_SWITCHES = (
    "hybrid/bytes_sent", "hybrid/bytes_received", "hybrid/bytes_aliased", "hybrid/bytes_copied", "hybrid/seconds",
    "hybrid/turn_seconds",
)  # fmt: skip
"""The other numbers of a step's switches are those of the one with the most."""


def with_switch(so_far: Mapping[str, float], switch: Mapping[str, float]) -> dict[str, float]:
    """`hybrid/…` of the step's switches `so_far` and one more: bytes that were moved and seconds are sums."""
    return {
        name: value + so_far.get(name, 0.0) if name in SUMS_OF_SWITCHES else max(value, so_far.get(name, value))
        for name, value in switch.items()
    }


def sync_metrics(report: SyncReport, mesh: Mesh) -> dict[str, float]:
    """`hybrid/…` of one switch to generation: bytes moved are summed over ranks; seconds, and the bytes that a device
    has to hold, are those of the rank with the most."""
    total = {
        "hybrid/bytes_sent": report.bytes_sent,
        "hybrid/bytes_received": report.bytes_received,
        "hybrid/bytes_aliased": report.bytes_aliased,
        "hybrid/bytes_copied": report.bytes_copied,
    }
    largest = {
        "hybrid/seconds": report.transfer_seconds,
        "hybrid/turn_seconds": report.seconds + report.release_seconds,
        "hybrid/peak_bytes": report.peak_bytes,
        "hybrid/extra_bytes": report.extra_bytes,
        "hybrid/held_asleep_bytes": report.held.asleep,
        "hybrid/held_weights_bytes": report.held.with_weights,
        "hybrid/held_awake_bytes": report.held.awake,
    }
    sums = sum_over(mesh.world_group, mesh.device)(torch.tensor(list(total.values()), dtype=torch.float64))
    maxima = max_over(mesh.world_group, mesh.device)(torch.tensor(list(largest.values()), dtype=torch.float64))
    return dict(zip([*total, *largest], [*sums.tolist(), *maxima.tolist()], strict=True))
