"""Micro-batches by tokens: the way back, empty ones, and the same loss and gradient as padded ones."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megappo.algorithms.aggregate import Denominators
from megappo.config.actor import ActorConfig
from megappo.experience.batch import ExperienceBatch
from megappo.experience.cut import Cut, TokenParts, cut_by_tokens, empty_like
from megappo.experience.micro import micro_batches
from megappo.experience.packed import packed_micro_batches
from megappo.workers.actor import ActorLoss, estimated_kl
from megappo.workers.cutting import Cutter
from tests.unit.test_loss_splits import BATCH, LOG_PROBS, LOSSES, MODES, logits

CPU = torch.device("cpu")


def batch() -> ExperienceBatch:
    made = ExperienceBatch.from_sequences([[5, 6, 7], [8], [9, 10, 11, 12], [13, 14]], [1, 1, 2, 1], range(4))
    return made.fill(values=torch.arange(10, dtype=torch.float32), scores=torch.arange(4, dtype=torch.float32))


def test_results_come_back_in_order() -> None:
    parts = TokenParts.of(batch(), limit=5)
    assert parts.fewest == [[0, 3], [1, 2]]
    cut = cut_by_tokens(batch(), parts.of_number(4), alignment=2, device=CPU)
    # Four parts of four sequences; of six, two are empty: one token, no response.
    assert [micro.rows.num_tokens for micro in cut.micros] == [3, 1, 4, 2]
    cut = cut_by_tokens(batch(), parts.of_number(6), alignment=2, device=CPU)
    assert [micro.length for micro in cut.micros] == [4, 2, 4, 2, 2, 2]
    empty = cut.micros[-1]
    assert (empty.num_sequences, empty.rows.num_tokens, bool(empty.response_mask.any())) == (1, 1, False)
    assert empty.view("values").tolist() == [[0, 0]] and empty.rows.get("scores").tolist() == [0]
    assert [micro.rows.is_nothing for micro in cut.micros[-3:]] == [False, True, True]
    both = cut_by_tokens(batch(), parts.fewest, alignment=2, device=CPU)
    for each in (cut, both):
        flat = torch.cat([micro.flat(micro.view("values")) for micro in each.micros])
        assert torch.equal(each.restored(flat), batch().get("values"))
    assert both.micros[0].token_ids.tolist() == [[5, 6, 7, 13, 14, 0]]
    assert both.micros[0].position_ids.tolist() == [[0, 1, 2, 0, 1, 0]]
    assert both.micros[0].rows.positions.tolist() == [0, 3]


def test_an_empty_part_takes_no_expert_over() -> None:
    """Its router chooses: experts by twos of zeros would be one expert twice."""
    routed = torch.arange(2 * 10 * 2, dtype=torch.int16).view(10, 2, 2)
    with_experts = batch().fill(routed_experts=routed)
    cut = cut_by_tokens(with_experts, TokenParts.of(with_experts, limit=5).of_number(6), alignment=2, device=CPU)
    assert cut.micros[-1].rows.get("routed_experts").tolist() == [[[-1, -1], [-1, -1]]]


def test_parts_of_a_larger_number_that_are_over_the_limit_are_not_taken() -> None:
    """The fewest parts that fit, and empty ones."""
    lengths = (5, 5, 4, 4, 3, 3)
    parts = TokenParts(lengths, 9, [[0, 2], [1, 3], [4, 5]])
    for number in range(3, 8):
        found = parts.of_number(number)
        assert len(found) == number and sorted(itertools.chain(*found)) == list(range(6))
        assert max(sum(lengths[place] for place in part) for part in found) <= 9


def test_the_first_token_of_a_packed_sequence_is_not_predicted() -> None:
    """Nothing is read from the sequence before it, even where the mask is true there."""
    made = ExperienceBatch.from_sequences([[5, 6], [7, 8]], [0, 0], range(2))
    (padded,), (packed,) = micro_batches(made, 2), packed_micro_batches(made, 2)
    assert padded.predicted.tolist() == [[False, True], [False, True]]
    assert packed.predicted.tolist() == [[False, True, False, True]]
    assert packed.over_sequence(torch.tensor([[1.0, 2.0, 3.0, 4.0]])).tolist() == [[3, 3, 7, 7]]
    assert padded.over_sequence(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist() == [[3, 3], [7, 7]]


def loss_and_gradient(config: ActorConfig, cut: Cut, order: list[list[int]]) -> tuple[float, torch.Tensor]:
    parameters = logits(1).requires_grad_()
    denominators = Denominators.of(BATCH.padded(BATCH.response_mask))
    total = torch.zeros(())
    for micro, rows in zip(cut.micros, order, strict=True):
        loss = ActorLoss(
            config, LOG_PROBS, denominators, scale_length=7, entropy_coeff=0.1,
            token_kl=estimated_kl("low_var_kl")([]),
        )  # fmt: skip
        own = [parameters[row, : int(BATCH.lengths[row])] for row in rows] or [parameters[0, :1]]
        flat = torch.cat(own)
        row = torch.nn.functional.pad(flat, (0, 0, 0, micro.length - len(flat)))[None]
        total = total + loss(row, micro).loss
    (gradient,) = torch.autograd.grad(total, parameters)
    return total.item(), gradient


@pytest.mark.parametrize(("mode", "mean"), itertools.product(LOSSES, MODES))
def test_packed_and_dynamic_give_the_loss_and_gradient_of_single_sequences(mode: str, mean: str) -> None:
    config = ActorConfig.model_validate(
        {"policy_loss": {"loss_mode": mode}, "loss_agg_mode": mean, "use_kl_loss": True, "kl_loss_coef": 0.5}
    )
    count = BATCH.num_sequences
    alone = [[row] for row in range(count)]
    expected, gradient = loss_and_gradient(config, Cut(micro_batches(BATCH, 1)), alone)
    parts = TokenParts.of(BATCH, 12)
    cuts = {
        "packed": (Cut(packed_micro_batches(BATCH, 4, alignment=8)), [list(range(4)), list(range(4, count))]),
        "fewest": (cut_by_tokens(BATCH, parts.fewest, alignment=4, device=CPU), parts.fewest),
        "empty": (cut_by_tokens(BATCH, parts.of_number(10), alignment=4, device=CPU), parts.of_number(10)),
    }
    for name, (cut, order) in cuts.items():
        ours, ours_gradient = loss_and_gradient(config, cut, order)
        assert ours == pytest.approx(expected, rel=1e-6), name
        assert float((ours_gradient - gradient).norm() / gradient.norm()) <= 1e-6, name


class OneRank:
    """Of a group without others."""

    def size(self) -> int:
        return 1


@pytest.mark.parametrize(("vpp", "tokens"), [(1, [3, 3, 4]), (2, [1, 2, 3, 4])])
def test_virtual_stages_cut_a_multiple_of_pp(vpp: int, tokens: list[int]) -> None:
    """Sequences of 3, 1, 4 and 2 tokens in micro-batches of 4: three hold them, and two ranks with virtual stages take
    four."""
    mesh: Any = SimpleNamespace(pp=2, vpp=vpp, cp=1, dp_group=OneRank(), device=CPU, sequence_alignment=1)
    cut = Cutter(mesh, 1, packed=True, max_tokens=4)(batch())
    assert sorted(micro.rows.num_tokens for micro in cut.micros) == tokens


def test_a_micro_batch_that_fills_up_has_no_token_of_a_response() -> None:
    for cut in (micro_batches, packed_micro_batches):
        micro = cut(batch(), 2, alignment=2)[0]
        empty = empty_like(micro, 2)
        assert type(empty) is type(micro) and empty.token_ids.shape == (1, 2) and empty.rows.num_tokens == 1
        assert not empty.predicted.any() and empty.view("values").tolist() == [[0, 0]]
