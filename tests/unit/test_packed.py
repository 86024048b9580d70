"""Packed micro-batches: one row without padding, positions that begin anew, and the way back; by hand."""

import torch

from megappo.experience.batch import ExperienceBatch
from megappo.experience.packed import PackedMicroBatch, packed_micro_batches


def batch() -> ExperienceBatch:
    made = ExperienceBatch.from_sequences([[5, 6, 7], [8, 9], [10, 11, 12, 13]], [1, 1, 2], range(3))
    return made.fill(values=torch.arange(9, dtype=torch.float32))


def test_rows_are_packed_in_order() -> None:
    first, second = packed_micro_batches(batch(), 2, alignment=4)
    assert isinstance(first, PackedMicroBatch) and isinstance(second, PackedMicroBatch)
    assert first.token_ids.tolist() == [[5, 6, 7, 8, 9, 0, 0, 0]]
    assert first.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 0, 0]]
    assert first.response_mask.tolist() == [[False, True, True, False, True, False, False, False]]
    assert first.view("values").tolist() == [[0, 1, 2, 3, 4, 0, 0, 0]]
    assert (first.boundaries.tolist(), first.boundaries.dtype) == ([0, 3, 5, 8], torch.int32)
    assert first.flat(torch.arange(8)[None]).tolist() == [0, 1, 2, 3, 4]
    # No padding, no sequence of padding.
    assert (second.token_ids.tolist(), second.boundaries.tolist()) == ([[10, 11, 12, 13]], [0, 4])
    assert (first.num_sequences, first.length, second.num_sequences) == (2, 8, 1)
