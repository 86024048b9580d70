"""A reward model's scores: what its value head says at the last token of a sequence, as transformers reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from megappo.experience.batch import ExperienceBatch
from megappo.experience.micro import MicroBatch


def scored_batch(sequences: Sequence[Sequence[int]], pad_id: int | None) -> ExperienceBatch:
    """Sequences as a batch whose mask is true at the one token of each that the score is read at.

    That is the last one that is not `pad_id` of the model's configuration, or the first where all are: the rule of
    transformers' sequence classifiers, which also holds where the padding token closes every response.
    """
    batch = ExperienceBatch.from_sequences(sequences, [0] * len(sequences), range(len(sequences)))
    places = [
        start + score_place(ids, pad_id) for start, ids in zip(batch.cu_seqlens.tolist(), sequences, strict=False)
    ]
    mask = torch.zeros(batch.num_tokens, dtype=torch.bool)
    mask[places] = True
    return dataclasses.replace(batch, response_mask=mask)


def score_place(token_ids: Sequence[int], pad_id: int | None) -> int:
    """The place of the last token that is not `pad_id`, 0 where there is none."""
    return max((place for place, token in enumerate(token_ids) if token != pad_id), default=0)


def scores_at_tokens(output: Tensor, micro: MicroBatch) -> Tensor:
    """[b, s / cp, 1] output of a value head → [b, s] float32, 0 but at the tokens that scores are read at."""
    mask = micro.local(micro.response_mask)
    return micro.whole(torch.where(mask, output[..., 0].float(), 0.0))
