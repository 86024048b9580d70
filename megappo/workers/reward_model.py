"""A reward model on the ranks of the training layout, which scores samples in its own words.

Its tokenizer and chat template may be others than the actor's: prompt and response are rendered and tokenised anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megappo.data.conversation import ConversationEncoder
from megappo.engines.training import ModelEngine
from megappo.errors import DataError
from megappo.experience.sample import RolloutSample
from megappo.parallel.collectives import max_over
from megappo.rewards.reward import FailedReward, Reward
from megappo.workers.cutting import Cutter
from megappo.workers.pairs import summed
from megappo.workers.scores import scored_batch, scores_at_tokens

PLACEHOLDER = [0]
"""Tokens in the place of a sample that can't be scored, and of those that other ranks have more."""


@dataclass(frozen=True)
class RewardModel:
    """A frozen value model and what it reads. `part` is its name in `reward.parts`."""

    part: str
    engine: ModelEngine
    encoder: ConversationEncoder
    pad_id: int | None
    vocab_size: int
    max_positions: int
    cut: Cutter

    def score(self, samples: Sequence[RolloutSample]) -> list[Reward | FailedReward]:
        """One outcome a sample, the same on every rank of the model. A collective call over the world.

        A sample that the template refuses, or that has more tokens than the model has positions, has failed.
        """
        encoded = [self._encoded(sample) for sample in samples]
        sequences = [PLACEHOLDER if isinstance(tokens, str) else tokens for tokens in encoded]
        scores = self._scores(sequences)
        outcomes: list[Reward | FailedReward] = []
        for index, (tokens, score) in enumerate(zip(encoded, scores, strict=False)):
            problem = tokens if isinstance(tokens, str) else None
            if problem is None and not math.isfinite(score):
                problem = f"the reward model's score is {score}"
            outcomes.append(Reward(score) if problem is None else FailedReward(index, self.part, problem))
        return outcomes

    def _scores(self, sequences: list[list[int]]) -> list[float]:
        """As many forward passes on every data-parallel rank: experts exchange tokens between them."""
        mesh = self.engine.mesh
        most = int(max_over(mesh.dp_group, mesh.device)(torch.tensor([len(sequences)], dtype=torch.int64))[0])
        if most == 0:
            return []
        batch = scored_batch(sequences + [PLACEHOLDER] * (most - len(sequences)), self.pad_id)
        cut = self.cut(batch)
        flat = cut.restored(self.engine.per_token(cut.micros, scores_at_tokens))
        scores: list[float] = summed(batch, flat).tolist()
        return scores

    def _encoded(self, sample: RolloutSample) -> list[int] | str:
        """Token ids, or why there are none that the model can read."""
        try:
            (tokens,) = self.encoder.encode([sample.prompt], [sample.text], [sample.finish_reason == "stop"])
        except DataError as error:
            return str(error)
        if not tokens:
            return "the conversation has no tokens"
        if len(tokens) > self.max_positions:
            return f"the conversation has {len(tokens)} tokens, the reward model was made for {self.max_positions}"
        if max(tokens) >= self.vocab_size:
            return f"the tokenizer gives token {max(tokens)}, the model's vocabulary ends at {self.vocab_size - 1}"
        return tokens
