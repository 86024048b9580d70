"""Which tokens of a micro-batch a rank's routers see: the order of Megatron's [s / tp, b], padded and packed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megappo.engines.routing import LocalTokens
from megappo.experience.batch import ExperienceBatch
from megappo.experience.micro import MicroBatch, micro_batches
from megappo.experience.packed import packed_micro_batches

LENGTHS = (5, 2, 6)


def batch() -> ExperienceBatch:
    """Three sequences; a token's id and its experts are its place in the batch."""
    places = iter(range(sum(LENGTHS)))
    rows = ExperienceBatch.from_sequences([[next(places) for _ in range(n)] for n in LENGTHS], [1, 1, 1], [0, 1, 2])
    experts = rows.token_ids[:, None, None].expand(-1, 2, 3).to(torch.int16)
    return rows.fill(routed_experts=experts.clone())


def mesh(tp: int, rank: int, sequence_parallel: bool) -> Any:
    device = torch.device("cpu")
    return SimpleNamespace(tp=tp, tp_rank=rank, sequence_parallel=sequence_parallel, device=device)


@pytest.mark.parametrize("cut", [micro_batches, packed_micro_batches])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_token_is_seen_once_and_finds_its_own_experts(cut: Any, tp: int) -> None:
    (micro,) = cut(batch(), 3, alignment=tp)
    seen: list[int] = []
    for rank in range(tp):
        tokens = LocalTokens.of(micro, mesh(tp, rank, tp > 1))
        # What Megatron hands to the rank: [b, s] becomes [s, b], of which it has its part of s.
        ids = micro.token_ids.T.chunk(tp, dim=0)[rank].flatten()
        is_token = tokens.is_token()
        assert len(is_token) == len(ids) == tokens.count
        taken = tokens.scattered(micro.rows.get("routed_experts"))
        assert torch.equal(taken[is_token, 1, 2].long(), ids[is_token])
        assert (taken[~is_token] == -1).all()
        # And back: what the router chose for a local token stands at that token of the rows.
        assert torch.equal(micro.rows.token_ids[tokens.is_here], ids[tokens.places])
        seen += ids[is_token].tolist()
    assert sorted(seen) == list(range(sum(LENGTHS)))


def test_without_sequence_parallelism_a_rank_sees_all() -> None:
    micro: MicroBatch = micro_batches(batch(), 3)[0]
    assert bool(LocalTokens.of(micro, mesh(2, 1, False)).is_here.all())
