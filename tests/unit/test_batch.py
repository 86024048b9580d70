"""The experience batch: from samples to flat tensors, padded views and back, slices, and fields read too early."""

import math

import pytest
import torch

from megappo.experience.batch import ExperienceBatch, NotFilledError
from megappo.experience.sample import Prompt, RolloutSample


def sample(position: int, prompt: tuple[int, ...], response: tuple[int, ...]) -> RolloutSample:
    log_probs = tuple(-float(token) for token in response)
    return RolloutSample(
        Prompt(index=position, source="made", token_ids=prompt, text=""), position, 0, response, log_probs, "", "stop"
    )


@pytest.fixture
def batch() -> ExperienceBatch:
    """The docstring's example, with a third sequence whose response is empty."""
    return ExperienceBatch.from_samples(
        [sample(7, (1, 2, 3), (4, 5)), sample(2, (6,), (7, 8, 9)), sample(4, (10, 11), ())]
    )


def test_samples_are_laid_out_flat(batch: ExperienceBatch) -> None:
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert batch.cu_seqlens.tolist() == [0, 5, 9, 11]
    assert batch.response_mask.int().tolist() == [0, 0, 0, 1, 1, 0, 1, 1, 1, 0, 0]
    assert batch.rollout_log_probs.tolist() == [0, 0, 0, -4, -5, 0, -7, -8, -9, 0, 0]
    assert batch.positions.tolist() == [7, 2, 4]
    assert (batch.num_sequences, batch.num_tokens, batch.lengths.tolist()) == (3, 11, [5, 4, 2])
    assert (batch.token_ids.dtype, batch.response_mask.dtype) == (torch.int64, torch.bool)


def test_sequences_of_any_origin() -> None:
    batch = ExperienceBatch.from_sequences([(1, 2, 3), (4, 5)], response_starts=[1, 2], positions=[1, 0])
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert batch.response_mask.int().tolist() == [0, 1, 1, 0, 0]
    assert batch.cu_seqlens.tolist() == [0, 3, 5]
    assert batch.positions.tolist() == [1, 0]
    assert batch.rollout_log_probs.tolist() == [0, 0, 0, 0, 0]


def test_padded_view(batch: ExperienceBatch) -> None:
    assert batch.padded(batch.token_ids).tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 0], [10, 11, 0, 0, 0]]
    assert batch.padded(batch.token_ids, length=6).shape == (3, 6)
    assert batch.is_token(6).sum(dim=1).tolist() == [5, 4, 2]


def test_flat_is_the_inverse_of_padded_and_drops_padding(batch: ExperienceBatch) -> None:
    values = torch.arange(11.0)
    view = batch.padded(values, length=7)
    view[~batch.is_token(7)] = math.nan
    assert torch.equal(batch.flat(view), values)


def test_padded_keeps_further_dimensions(batch: ExperienceBatch) -> None:
    wide = torch.arange(22.0).reshape(11, 2)
    assert batch.padded(wide)[1, 3].tolist() == [16, 17]
    assert torch.equal(batch.flat(batch.padded(wide)), wide)


def test_rows_are_views_with_offsets_of_their_own(batch: ExperienceBatch) -> None:
    filled = batch.fill(scores=torch.tensor([0.1, 0.2, 0.3]), values=torch.arange(11.0))
    part = filled.rows(1, 3)
    assert part.token_ids.tolist() == [6, 7, 8, 9, 10, 11]
    assert part.cu_seqlens.tolist() == [0, 4, 6]
    assert part.positions.tolist() == [2, 4]
    assert part.get("scores").tolist() == pytest.approx([0.2, 0.3])
    assert part.get("values").tolist() == [5, 6, 7, 8, 9, 10]
    assert part.advantages is None
    assert part.token_ids.untyped_storage().data_ptr() == batch.token_ids.untyped_storage().data_ptr()


def test_no_rows(batch: ExperienceBatch) -> None:
    part = batch.rows(1, 1)
    assert (part.num_sequences, part.num_tokens, part.cu_seqlens.tolist()) == (0, 0, [0])
    assert part.padded(part.token_ids, length=4).shape == (0, 4)


@pytest.mark.parametrize(
    ("name", "phase"),
    [("scores", "reward"), ("old_log_probs", "old log-prob"), ("values", "value"), ("advantages", "advantage")],
)
def test_a_field_read_too_early_names_its_phase(batch: ExperienceBatch, name: str, phase: str) -> None:
    with pytest.raises(NotFilledError, match=f"batch.{name} is not there yet: it is filled by the {phase} phase"):
        batch.get(name)


def test_fill_checks_shapes_and_leaves_the_old_batch(batch: ExperienceBatch) -> None:
    filled = batch.fill(values=torch.zeros(11))
    assert batch.values is None
    assert filled.get("values").shape == (11,)
    with pytest.raises(AssertionError, match=r"scores has shape \(11,\), the batch needs \(3,\)"):
        batch.fill(scores=torch.zeros(11))
    with pytest.raises(AssertionError, match=r"values has shape \(3,\), the batch needs \(11,\)"):
        batch.fill(values=torch.zeros(3))
