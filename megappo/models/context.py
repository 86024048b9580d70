"""Attention's exchange between context-parallel ranks, whose tokens are cut as `experience/context.py` says.

Two ways, of Megatron's names: `all_gather` brings all keys and values to every rank, whose queries stay; `a2a` brings
all tokens of a rank's share of the heads to it and takes the results back (DeepSpeed Ulysses, arXiv 2309.14509).
"""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from megatron.core.tensor_parallel import all_to_all, gather_from_sequence_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup

from megappo.experience.context import natural_order, zigzag_places


@dataclass(frozen=True)
class Part:
    """Queries that stand together, among the tokens at hand, and the keys of their sequence up to the last of them."""

    queries: slice
    keys: slice


@dataclass(frozen=True)
class ContextRow:
    """A row of sequences that begin and end at `ends`, one more than there are, shared by the ranks of `group`."""

    group: ProcessGroup
    ends: tuple[int, ...]

    def gathered(self, local: Tensor) -> Tensor:
        """[s / cp, …] → [s, …] in the order of the row; gradients are summed over the ranks."""
        ranks = gather_from_sequence_parallel_region(local, tensor_parallel_output_grad=True, group=self.group)
        return ranks[self._order(local)]

    def heads_for_tokens(self, local: Tensor) -> Tensor:
        """[s / cp, …, heads, d] → [s, …, heads / cp, d] in the order of the row."""
        size = self.group.size()
        split = local.unflatten(-2, (size, -1)).movedim(-3, 0)  # [cp, s / cp, …, heads / cp, d]
        return all_to_all(self.group, split.flatten(0, 1).contiguous())[self._order(local)]

    def tokens_for_heads(self, whole: Tensor) -> Tensor:
        """[s, …, heads / cp, d] → [s / cp, …, heads, d], the way back."""
        size = self.group.size()
        in_rank_order = whole[_rank_order(self.ends, size, whole.device)]
        received = all_to_all(self.group, in_rank_order.contiguous()).unflatten(0, (size, -1))
        return received.movedim(0, -3).flatten(-3, -2)

    def sequences(self) -> list[Part]:
        """Each sequence of the row, whole."""
        return [Part(slice(start, stop), slice(start, stop)) for start, stop in pairwise(self.ends)]

    def chunks(self) -> list[Part]:
        """This rank's chunks, two a sequence in the order of its tokens, with all keys up to their ends."""
        size, rank = self.group.size(), self.group.rank()
        chunks, local = [], 0
        for start, stop in pairwise(self.ends):
            length = (stop - start) // (2 * size)
            for number in (rank, 2 * size - 1 - rank):
                keys = slice(start, start + (number + 1) * length)
                chunks.append(Part(slice(local, local + length), keys))
                local += length
        return chunks

    def _order(self, like: Tensor) -> Tensor:
        return _natural_order(self.ends, self.group.size(), like.device)


# All layers of a micro-batch ask for the same.
@lru_cache(maxsize=8)
def _natural_order(ends: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    return natural_order(torch.tensor(ends), size).to(device)


@lru_cache(maxsize=8)
def _rank_order(ends: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """The places of all ranks' tokens, those of rank 0 first: the inverse of `natural_order`."""
    return torch.cat([zigzag_places(torch.tensor(ends), size, rank) for rank in range(size)]).to(device)
