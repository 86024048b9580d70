"""How context-parallel ranks share the tokens of a micro-batch: the zigzag cut. The groups of ranks are not known here.

Each sequence of a row is cut into 2 · size chunks, of which rank i has chunks i and 2 · size − 1 − i: under a causal
mask all ranks have the same work. This is the cut of Megatron and Transformer Engine.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Gather = Callable[[Tensor], Tensor]
"""[n, …] of this rank → [size · n, …] of all ranks in their order; the gradient of a rank is that of its own part."""


@dataclass(frozen=True)
class ContextCut:
    """This rank's place among `size` context-parallel ranks. `gather` is None where there is one alone."""

    size: int = 1
    rank: int = 0
    gather: Gather | None = None

    @property
    def alignment(self) -> int:
        """The length of each sequence is a multiple of this."""
        return 2 * self.size if self.size > 1 else 1

    def local(self, view: Tensor, ends: Tensor) -> Tensor:
        """[b, s, …] → [b, s / size, …]: this rank's part of rows whose sequences end at `ends` (`zigzag_places`)."""
        return view[:, zigzag_places(ends, self.size, self.rank).to(view.device)]

    def whole(self, local: Tensor, ends: Tensor) -> Tensor:
        """[b, s / size, …] of each rank → [b, s, …] on all of them. A collective call over the context-parallel ranks.

        All of them compute the same from the result, so that its gradient comes to each rank whole: a rank takes that
        of its own part, and sums over ranks count it once.
        """
        assert self.gather is not None, "several context-parallel ranks have a group"
        rows = self.gather(local.contiguous()).unflatten(0, (self.size, -1))  # [size, b, s / size]
        in_rank_order = rows.transpose(0, 1).flatten(1, 2)
        return in_rank_order[:, natural_order(ends, self.size).to(local.device)]


WHOLE = ContextCut()


def zigzag_places(ends: Tensor, size: int, rank: int) -> Tensor:
    """[s / size] int64: where the tokens of `rank` stand in a row whose sequences begin and end at `ends`
    [sequences + 1], each of a length that 2 · `size` divides. Two sequences of 4 and 8 tokens on 2 ranks: rank 0 has
    0 3 | 4 5 10 11.
    """
    ends = ends.long()
    starts, chunks = ends[:-1], ends.diff() // (2 * size)
    owner = torch.repeat_interleave(torch.arange(len(starts), device=ends.device), 2 * chunks)
    chunk = chunks[owner]
    inside = torch.arange(len(owner), device=ends.device) - (starts // size)[owner]
    shift = torch.where(inside < chunk, rank, 2 * size - 2 - rank) * chunk
    return starts[owner] + inside + shift


def natural_order(ends: Tensor, size: int) -> Tensor:
    """[s] int64: which of the ranks' tokens, those of rank 0 first, stands at each place of the row."""
    return torch.cat([zigzag_places(ends, size, rank) for rank in range(size)]).argsort()
