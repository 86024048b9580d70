"""Training a reward model on the same engine: the task of `offline.py` on preference pairs, with a value head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megappo.algorithms.preferences import PairLoss, bradley_terry_loss
from megappo.data.conversation import ConversationEncoder
from megappo.data.preferences import PreferencePair
from megappo.engines.training import LossTerm, ModelEngine, UpdateReport
from megappo.errors import DataError
from megappo.experience.batch import ExperienceBatch
from megappo.experience.micro import MicroBatch
from megappo.trainer.loop import Step
from megappo.workers.cutting import Cutter
from megappo.workers.pairs import chosen_and_rejected, pair_means, sequence_sums, summed
from megappo.workers.scores import scored_batch, scores_at_tokens


@dataclass(frozen=True)
class EncodedPair:
    """The two conversations of a pair as the reward model reads them."""

    chosen: tuple[int, ...]
    rejected: tuple[int, ...]


@dataclass(frozen=True)
class RewardModelTask:
    """Learns to score the chosen response above the rejected one. `num_pairs` are those of one step over all ranks."""

    pairs: Sequence[EncodedPair]
    pad_id: int | None
    num_pairs: int
    sequences_per_row: int = 2

    def batch(self, rows: Sequence[int], step: Step) -> ExperienceBatch:
        return encoded_batch([self.pairs[row] for row in rows], self.pad_id)

    def loss(self, batch: ExperienceBatch) -> RewardModelLoss:
        return RewardModelLoss(self.num_pairs)

    def metrics(self, report: UpdateReport) -> dict[str, float]:
        return report.metrics | {
            "reward_model/grad_norm": report.grad_norm,
            "reward_model/lr": report.learning_rate,
        }


class RewardModelLoss:
    """The Bradley-Terry loss, mean over the pairs of the global batch."""

    metrics = (
        "reward_model/loss", "reward_model/accuracy", "reward_model/margin", "reward_model/chosen_score",
        "reward_model/rejected_score",
    )  # fmt: skip

    def __init__(self, num_pairs: int) -> None:
        self._num_pairs = num_pairs

    def __call__(self, output: Tensor, micro: MicroBatch) -> LossTerm:
        """`output` [b, s, 1] of the value head."""
        chosen, rejected = chosen_and_rejected(sequence_sums(micro, scores_at_tokens(output, micro)))
        return pair_means(bradley_terry_loss(chosen, rejected), self._num_pairs)


@dataclass(frozen=True)
class RewardModelMeasure:
    """The loss of held-out pairs, without gradients. A collective call over the model's ranks."""

    model: ModelEngine
    pad_id: int | None
    micro_batch_size: int

    def __call__(self, pairs: Sequence[EncodedPair]) -> PairLoss:
        batch, mesh = encoded_batch(pairs, self.pad_id), self.model.mesh
        micros = Cutter(mesh, self.micro_batch_size)(batch).micros
        scores = summed(batch, self.model.per_token(micros, scores_at_tokens))
        return bradley_terry_loss(*chosen_and_rejected(scores))


def encoded_batch(pairs: Sequence[EncodedPair], pad_id: int | None) -> ExperienceBatch:
    """Pairs as a batch of 2 · pairs sequences, chosen and rejected in turn."""
    return scored_batch([ids for pair in pairs for ids in (pair.chosen, pair.rejected)], pad_id)


def encode_pairs(
    pairs: Sequence[PreferencePair], encoder: ConversationEncoder, max_positions: int
) -> list[EncodedPair]:
    """Pairs through the reward model's own template. DataError where one has more tokens than the model positions."""
    prompts = [pair.prompt for pair in pairs]
    columns = [
        encoder.encode(prompts, [getattr(pair, name) for pair in pairs], [True] * len(pairs))
        for name in ("chosen", "rejected")
    ]
    encoded = [EncodedPair(tuple(chosen), tuple(rejected)) for chosen, rejected in zip(*columns, strict=True)]
    for prompt, pair in zip(prompts, encoded, strict=True):
        longest = max(len(pair.chosen), len(pair.rejected))
        if longest > max_positions:
            raise DataError(
                f"pair {prompt.index} of {prompt.source} has {longest} tokens with its template, and the model was "
                f"made for {max_positions} positions; lower data.max_response_length and filter (data.overlong_prompts)"
            )
    return encoded
