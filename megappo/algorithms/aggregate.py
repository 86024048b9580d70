"""From per-token losses to one number: four aggregation modes, with the denominators of the global minibatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.algorithms.masked import OverSequence, SumOverRanks, keep, over_rows


@dataclass(frozen=True)
class Denominators:
    """What a minibatch is divided by: its response tokens, and its sequences that have at least one of them.

    A sequence without response tokens has no loss and is not counted, so it changes no mean.
    """

    tokens: int
    sequences: int

    @classmethod
    def of(cls, mask: Tensor) -> Denominators:
        """Counts of a response mask [B, T]: of one micro-batch or of everything that this rank holds of a minibatch."""
        return cls(tokens=int(mask.sum()), sequences=int(mask.any(dim=-1).sum()))

    def __add__(self, other: Denominators) -> Denominators:
        return Denominators(self.tokens + other.tokens, self.sequences + other.sequences)

    def reduced(self, sum_over_ranks: SumOverRanks, device: torch.device | str = "cpu") -> Denominators:
        """The counts summed over data-parallel ranks; `device` is where the collective wants its tensor."""
        counts = torch.tensor([self.tokens, self.sequences], dtype=torch.float64, device=device)
        tokens, sequences = sum_over_ranks(counts).tolist()
        return Denominators(tokens=int(tokens), sequences=int(sequences))


def aggregate(
    per_token: Tensor,
    mask: Tensor,
    mode: str,
    denominators: Denominators,
    scale_length: int | None = None,
    over_sequence: OverSequence = over_rows,
) -> Tensor:
    """This micro-batch's share of the global mean of `per_token` [B, T] over `mask` [B, T]; a float32 scalar.

    The sum of the shares over all micro-batches and data-parallel ranks *is* the mean of the minibatch; nothing is
    left to divide (take back what a schedule or DDP divides on its own). `denominators` are those of the minibatch on
    all ranks. `over_sequence` tells which tokens of a row are one sequence where several share it.

    - `token-mean`: Σ over tokens / tokens.
    - `seq-mean-token-sum`: Σ over sequences of their token sum / sequences.
    - `seq-mean-token-mean`: Σ over sequences of their token mean / sequences.
    - `seq-mean-token-sum-norm`: `seq-mean-token-sum` / `scale_length`, a constant length that does not depend on the
      batch (Dr. GRPO, arXiv 2503.20783; verl 0.9 divides by both as well).

    A minibatch without any response token gives 0, with a graph to go backward through.
    """
    assert mode in _MODES, f"{mode!r} is no aggregation mode: {', '.join(_MODES)}"
    kept = keep(mask, per_token.float())
    if mode == "seq-mean-token-mean":
        kept = kept / over_sequence(mask.float()).clamp(min=1)
    return _MODES[mode](kept, denominators, scale_length)


def _token_mean(kept: Tensor, denominators: Denominators, scale_length: int | None) -> Tensor:
    return kept.sum() / max(denominators.tokens, 1)


def _seq_mean_token_sum(kept: Tensor, denominators: Denominators, scale_length: int | None) -> Tensor:
    return kept.sum() / max(denominators.sequences, 1)


def _seq_mean_token_sum_norm(kept: Tensor, denominators: Denominators, scale_length: int | None) -> Tensor:
    assert scale_length, "seq-mean-token-sum-norm needs a constant length to divide by"
    return _seq_mean_token_sum(kept, denominators, scale_length) / scale_length


_MODES: dict[str, Callable[[Tensor, Denominators, int | None], Tensor]] = {
    "token-mean": _token_mean,
    "seq-mean-token-sum": _seq_mean_token_sum,
    "seq-mean-token-mean": _seq_mean_token_sum,
    "seq-mean-token-sum-norm": _seq_mean_token_sum_norm,
}
