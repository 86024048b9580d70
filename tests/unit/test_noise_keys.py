"""Keys of the sampling noise: every sequence, batch and turn of a run has its own, and old ones stay what they were."""

from itertools import product

import numpy
import pytest

from megappo.engines.rollout import SamplingParams
from megappo.workers.rollout import _Work, noise_key

EVALUATION_STREAM = 0x65766C


def work(seed: int, *stream: int, batch: int = 0) -> _Work:
    return _Work([], 1, SamplingParams(max_tokens=1), (seed, *stream), batch, with_environment=True)


@pytest.mark.parametrize("seed", [0, 1, 2**32 + 5, 2**64 + 5], ids=["0", "1", "two words", "three words"])
def test_no_two_sequences_draw_the_same_noise(seed: int) -> None:
    """Zeros are where keys of different lengths could meet: the first sequence, batch 0, turn 0, the first set."""
    keys = [
        work(seed, step, batch=batch).key(position, turn)
        for step, batch, position, turn in product(range(1, 4), range(6), range(12), range(4))
    ]
    # An evaluation's first sequence is training's of step 0x65766C, which no test reaches, hence from sequence 1.
    evaluations = [
        work(seed, EVALUATION_STREAM, held_out).key(position, turn)
        for held_out, position, turn in product(range(3), range(1, 12), range(4))
    ]
    assert len({*keys, *evaluations}) == 3 * 6 * 12 * 4 + 3 * 11 * 4


@pytest.mark.parametrize(
    ("seed", "step", "position", "turn", "expected"),
    [
        (0, 1, 0, 0, 2918264622725855778),
        (0, 1, 5, 0, 6961367642473578847),
        (0, 7, 63, 0, 8205519543430705033),
        (3, 2, 1, 0, 4404663168949438663),
        (2**32 + 5, 2, 1, 0, 641648678082737403),
        (0, 7, 1, 2, 759354796952813736),
        (3, 2, 5, 1, 891722178771051379),
    ],
)
def test_the_first_batchs_keys_are_what_they_have_always_been(
    seed: int, step: int, position: int, turn: int, expected: int
) -> None:
    """Golden curves, the documented numbers and resumed runs depend on them."""
    assert work(seed, step).key(position, turn) == expected


def test_what_keeps_keys_of_further_batches_apart_is_what_numpy_does() -> None:
    """Zeros at the end of fewer than four words are none; a spawn key stands behind four, with its zeros."""
    assert noise_key(0, 3, 2) == noise_key(0, 3, 2, 0)
    assert noise_key(0, 3, 2, spawned=(1, 0)) == noise_key(0, 3, 2, 0, 1, 0) != noise_key(0, 3, 2, 0, 1)
    sequence = numpy.random.SeedSequence([2**32 + 5, 3, 2, 0, 1, 0])  # a seed of two words: four with step and sequence
    expected = int(sequence.generate_state(1, numpy.uint64)[0]) >> 1
    assert noise_key(2**32 + 5, 3, 2, spawned=(0, 1, 0)) == expected
