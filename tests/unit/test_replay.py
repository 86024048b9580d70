"""The replay buffer: weights and draws against hand arithmetic, what leaves and returns, and what survives a save."""

import sqlite3
from collections import Counter
from pathlib import Path

import numpy
import pytest
import torch

from megappo.experience.batch import ExperienceBatch
from megappo.experience.replay import (
    Filtration,
    ReplayBuffer,
    StoredSequence,
    filtration_weights,
    joined,
    multinomial,
    replaced_places,
    restored,
    stored,
)

# Two groups of three, and one of a single sequence.
SCORES = [1.0, -3.0, 2.0, 0.5, 0.5, 0.5, -1.0]
GROUPS = [0, 0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize(
    ("filtration", "power", "expected"),
    [
        ("uniform", 2.0, [1, 1, 1, 1, 1, 1, 1]),
        ("power", 2.0, [1, 9, 4, 0.25, 0.25, 0.25, 1]),
        ("power", 1.0, [1, 3, 2, 0.5, 0.5, 0.5, 1]),
        ("max_min", 2.0, [0, 1, 1, 1, 0, 0, 1]),
        ("max_random", 2.0, [0.1, 0.1, 0.4, 0.4, 0.1, 0.1, 0.4]),
    ],
)
def test_weights(filtration: Filtration, power: float, expected: list[float]) -> None:
    assert filtration_weights(filtration, power, SCORES, GROUPS).tolist() == expected


def test_draws_follow_the_weights_and_the_seed() -> None:
    weights = numpy.array([1.0, 0.0, 3.0])
    draws = multinomial(weights, 40_000, seed=3, step=7)
    counts = Counter(draws)
    assert counts[1] == 0
    # Three standard deviations of a binomial share of 3/4 in 40,000 draws.
    assert abs(counts[2] / 40_000 - 0.75) < 3 * (0.75 * 0.25 / 40_000) ** 0.5
    assert draws == multinomial(weights, 40_000, seed=3, step=7)
    assert draws != multinomial(weights, 40_000, seed=3, step=8)
    assert multinomial(numpy.zeros(3), 5, seed=3, step=7) == []


def sequence(number: int, score: float = 1.0) -> StoredSequence:
    return StoredSequence(step=number // 10, group=number, score=score, content=bytes([number]))


@pytest.mark.parametrize("in_file", [False, True])
def test_the_oldest_leave_and_a_saved_buffer_draws_the_same(in_file: bool, tmp_path: Path) -> None:
    path = tmp_path / "replay" / "rank.sqlite" if in_file else None
    buffer = ReplayBuffer(4, "power", 2.0, seed=1, path=path)
    assert buffer.draw(3, step=1) == []
    buffer.push([sequence(number, score=number) for number in range(3)])
    buffer.push([sequence(number, score=number) for number in range(3, 6)])
    assert len(buffer) == 4
    drawn = buffer.draw(50, step=2)
    assert {buffer.read(one).score for one in drawn} <= {2.0, 3.0, 4.0, 5.0}
    buffer.save(tmp_path / "saved.sqlite")
    again = ReplayBuffer(4, "power", 2.0, seed=1)
    again.load(tmp_path / "saved.sqlite")
    assert again.draw(50, step=2) == drawn
    assert [again.read(one) for one in drawn] == [buffer.read(one) for one in drawn]
    smaller = ReplayBuffer(2, "uniform", 2.0, seed=1)
    smaller.load(tmp_path / "saved.sqlite")
    assert len(smaller) == 2 and {smaller.read(one).score for one in smaller.draw(50, step=1)} == {4.0, 5.0}
    for one in (buffer, again, smaller):
        one.close()


@pytest.mark.parametrize("folder", ["run#2", "half?full", "50%20 off", "grün [1]"])
def test_a_buffer_is_read_from_any_path(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Characters that mean something in an address, and a path that is relative as `trainer.run_dir` may be."""
    (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path)
    buffer, again = (ReplayBuffer(4, "uniform", 2.0, seed=1) for _ in range(2))
    buffer.push([sequence(7)])
    buffer.save(Path(folder) / "saved.sqlite")
    again.load(Path(folder) / "saved.sqlite")
    assert again.read(0) == sequence(7)
    for one in (buffer, again):
        one.close()


def batch_of_two() -> ExperienceBatch:
    """3 + 2 tokens with a gap in the second response, and 1 + 3."""
    batch = ExperienceBatch.from_sequences([[5, 6, 7, 8, 9], [5, 4, 3, 2]], [3, 1], positions=[4, 5])
    batch.response_mask[6] = False
    tokens = torch.arange(9, dtype=torch.float32)
    return batch.fill(
        scores=torch.tensor([0.5, -2.0]), old_log_probs=-tokens, ref_log_probs=-2 * tokens, values=tokens
    ).fill(token_rewards=tokens)


def test_a_sequence_comes_back_as_it_was() -> None:
    batch = batch_of_two()
    batch.rollout_log_probs[:] = -0.5 * torch.arange(9)
    rows = stored(batch, step=3, group_of=lambda position: 100 + position // 2)
    assert [(position, one.step, one.group, one.score) for position, one in rows] == [(4, 3, 102, 0.5), (5, 3, 102, -2)]
    row = restored(rows[1][1], position=9, step=3)
    assert row.token_ids.tolist() == [5, 4, 3, 2] and row.response_mask.tolist() == [False, False, True, True]
    assert row.positions.tolist() == [9] and row.cu_seqlens.tolist() == [0, 4] and row.scores.tolist() == [-2.0]
    assert row.ref_log_probs.tolist() == [-10, -12, -14, -16]
    assert row.values is None and row.token_rewards is None  # of another step's critic and coefficient
    assert row.old_log_probs.tolist() == [-5, -6, -7, -8]  # the policy of the same step: the ratio is 1
    later = restored(rows[1][1], position=9, step=4)
    assert later.old_log_probs.tolist() == [-2.5, -3.0, -3.5, -4.0]  # the engine's own: the policy that sampled


@pytest.mark.parametrize(
    ("filtration", "weights"),
    [("power", [2.25, 0.25, 16, 0]), ("max_min", [1, 1, 1, 1]), ("max_random", [0.1, 0.4, 0.4, 0.1])],
)
def test_rewards_of_tokens_are_part_of_what_sequences_are_drawn_by(
    filtration: Filtration, weights: list[float]
) -> None:
    """Two groups, worth -1½ and ½, 1 + 3 and nothing; an environment's token, masked, has one that does not count."""
    batch = ExperienceBatch.from_sequences([[5, 6, 7]] * 4, [1] * 4, positions=range(4))
    batch.response_mask[4] = False
    tokens = torch.tensor([0, -1, -0.5, 0, 99, 0.5, 0, 2, 1, 0, 0, 0])
    batch = batch.fill(scores=torch.tensor([0.0, 0, 1, 0]), old_log_probs=torch.zeros(12), token_scores=tokens)
    rows = [row for _, row in stored(batch, step=1, group_of=lambda position: position // 2)]
    assert [row.score for row in rows] == [-1.5, 0.5, 4, 0]
    found = filtration_weights(filtration, 2.0, [row.score for row in rows], [row.group for row in rows])
    assert found.tolist() == weights
    # The score and the tokens' rewards come back apart.
    row = restored(rows[2], position=0, step=1)
    assert row.scores.tolist() == [1] and row.token_scores.tolist() == [0, 2, 1]


def test_sequences_whose_tokens_alone_have_rewards_are_drawn() -> None:
    batch = ExperienceBatch.from_sequences([[5, 6]] * 2, [1] * 2, positions=range(2))
    batch = batch.fill(scores=torch.zeros(2), old_log_probs=torch.zeros(4), token_scores=torch.tensor([0, 0.5, 0, 0.0]))
    buffer = ReplayBuffer(2, "power", 2.0, seed=1)
    buffer.push([row for _, row in stored(batch, step=1, group_of=lambda position: 0)])
    drawn = buffer.draw(5, step=1)
    assert [buffer.read(one).score for one in drawn] == [0.5] * 5
    buffer.close()


def test_a_checkpoint_of_before_stays_readable(tmp_path: Path) -> None:
    """The same table, with scores that leave the tokens' rewards out."""
    batch = ExperienceBatch.from_sequences([[5, 6]], [1], positions=[0])
    tokens = torch.tensor([0, 0.5])
    batch = batch.fill(scores=torch.tensor([2.0]), old_log_probs=torch.zeros(2), token_scores=tokens)
    ((_, row),) = stored(batch, step=1, group_of=lambda position: 7)
    with sqlite3.connect(tmp_path / "replay.sqlite") as file:
        file.execute(
            "CREATE TABLE sequences (id INTEGER PRIMARY KEY, step INTEGER, prompt INTEGER, score REAL, content BLOB)"
        )
        file.execute("INSERT INTO sequences VALUES (3, 1, 7, 2.0, ?)", (row.content,))
    file.close()
    buffer = ReplayBuffer(4, "power", 2.0, seed=1)
    buffer.load(tmp_path / "replay.sqlite")
    (identity,) = set(buffer.draw(4, step=2))
    old = buffer.read(identity)
    assert (identity, old.step, old.group, old.score) == (3, 1, 7, 2.0)
    assert restored(old, position=5, step=2).token_scores.tolist() == [0, 0.5]
    buffer.push([row])
    assert [buffer.read(one).score for one in (3, 4)] == [2.0, 2.5]
    buffer.close()


def test_joined_rows_keep_what_all_have() -> None:
    batch = batch_of_two()
    both = joined([batch.rows(1, 2), restored(stored(batch, 1, lambda position: 0)[0][1], position=7, step=1)])
    assert both.token_ids.tolist() == [5, 4, 3, 2, 5, 6, 7, 8, 9]
    assert both.cu_seqlens.tolist() == [0, 4, 9] and both.positions.tolist() == [5, 7]
    assert both.values is None and both.scores.tolist() == [-2.0, 0.5]


@pytest.mark.parametrize(("fraction", "expected"), [(0.5, [1, 3, 5, 7]), (0.25, [3, 7]), (1.0, list(range(8)))])
def test_replaced_places_are_spread_alike_on_every_layout(fraction: float, expected: list[int]) -> None:
    assert replaced_places(range(8), fraction) == expected
    halves = [[0, 1, 4, 5], [2, 3, 6, 7]]
    found = [half[number] for half in halves for number in replaced_places(half, fraction)]
    assert sorted(found) == expected
