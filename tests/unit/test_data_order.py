"""The order of prompts: every prompt once an epoch, resumed to the row, refused where it can't be."""

import pytest

from megappo.data.iterate import PromptOrder
from megappo.data.mixture import MixedOrder, SetSize
from megappo.errors import DataError


def test_an_epoch_holds_every_prompt_once() -> None:
    order = PromptOrder(num_prompts=12, batch_size=4, seed=1)
    epochs = [[row for _ in range(order.steps_per_epoch) for row in order.next_batch()] for _ in range(3)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_incomplete_last_batch_is_left_out() -> None:
    order = PromptOrder(num_prompts=10, batch_size=4, seed=1)
    assert order.steps_per_epoch == 2
    epochs = [[*order.next_batch(), *order.next_batch()] for _ in range(50)]
    assert all(len(set(epoch)) == 8 for epoch in epochs)
    assert {row for epoch in epochs for row in epoch} == set(range(10))  # nobody is left out for good


def test_without_shuffling_rows_come_as_they_stand() -> None:
    order = PromptOrder(num_prompts=5, batch_size=2, seed=1, shuffle=False)
    assert [order.next_batch() for _ in range(4)] == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_epochs_are_counted() -> None:
    order = PromptOrder(num_prompts=4, batch_size=2, seed=0)
    seen = []
    for _ in range(5):
        seen.append(order.epoch)
        order.next_batch()
    assert seen == [0, 0, 1, 1, 2]


def test_the_order_depends_on_the_seed_alone() -> None:
    batches = [[PromptOrder(100, 100, seed).next_batch() for _ in range(2)] for seed in (0, 1)]
    assert batches[0][0] == batches[0][1] != batches[1][0]


def test_positions_are_uniform() -> None:
    """Over 4,000 epochs of 4 prompts each of the 24 orders comes about 167 times: chi-square with 23 degrees of freedom
    is under 49.7 with probability 0.999."""
    order = PromptOrder(num_prompts=4, batch_size=4, seed=3)
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(4000):
        batch = tuple(order.next_batch())
        counts[batch] = counts.get(batch, 0) + 1
    expected = 4000 / 24
    assert len(counts) == 24
    assert sum((count - expected) ** 2 / expected for count in counts.values()) < 49.7


@pytest.mark.parametrize("stop_after", range(8))
def test_resumed_to_the_row(stop_after: int) -> None:
    whole = PromptOrder(num_prompts=11, batch_size=3, seed=5)
    expected = [whole.next_batch() for _ in range(10)]
    first = PromptOrder(num_prompts=11, batch_size=3, seed=5)
    before = [first.next_batch() for _ in range(stop_after)]
    second = PromptOrder(num_prompts=11, batch_size=3, seed=5)
    second.load_state_dict(first.state_dict())
    assert before + [second.next_batch() for _ in range(10 - stop_after)] == expected


def test_a_changed_batch_size_goes_on_within_the_epoch() -> None:
    first = PromptOrder(num_prompts=12, batch_size=3, seed=5)
    seen = [*first.next_batch(), *first.next_batch()]
    second = PromptOrder(num_prompts=12, batch_size=6, seed=5)
    second.load_state_dict(first.state_dict())
    assert sorted(seen + second.next_batch()) == list(range(12))
    third = PromptOrder(num_prompts=12, batch_size=7, seed=5)
    third.load_state_dict(first.state_dict())
    assert third.epoch == 1  # 6 prompts are left, and a batch needs 7


@pytest.mark.parametrize(
    ("num_prompts", "seed", "name"), [(13, 5, "num_prompts 12, this run has 13"), (12, 6, "seed 5")]
)
def test_another_data_set_is_refused(num_prompts: int, seed: int, name: str) -> None:
    state = PromptOrder(num_prompts=12, batch_size=3, seed=5).state_dict()
    with pytest.raises(DataError, match=f"order of prompts has {name}"):
        PromptOrder(num_prompts, 3, seed).load_state_dict(state)


@pytest.mark.parametrize("was_shuffled", [True, False])
def test_changed_shuffling_is_refused(was_shuffled: bool) -> None:
    state = PromptOrder(12, 3, seed=5, shuffle=was_shuffled).state_dict()
    with pytest.raises(DataError, match=rf"has shuffle {was_shuffled}, this run has {not was_shuffled}: .*shuffle, or"):
        PromptOrder(12, 3, seed=5, shuffle=not was_shuffled).load_state_dict(state)


def test_a_checkpoint_from_before_shuffling_was_saved_is_read() -> None:
    order = PromptOrder(num_prompts=12, batch_size=3, seed=5)
    order.load_state_dict({"epoch": 1, "index": 3, "num_prompts": 12, "seed": 5})
    assert (order.epoch, order.prompts_seen) == (1, 15)


@pytest.mark.parametrize("name", ["sums", "num_prompts"])
def test_a_checkpoint_of_several_sets_is_refused(name: str) -> None:
    state = MixedOrder([SetSize(name, 12, 1.0), SetSize("words", 5, 1.0)], batch_size=3, seed=5).state_dict()
    with pytest.raises(
        DataError, match=rf"mixes the prompt sets {name}, words of data.sets, this run has none: resume"
    ):
        PromptOrder(num_prompts=12, batch_size=3, seed=5).load_state_dict(state)


def test_fewer_prompts_than_a_batch() -> None:
    with pytest.raises(
        DataError, match=r"data.train_batch_size is 8, but .* hold 5 prompts; set data.train_batch_size=5"
    ):
        PromptOrder(num_prompts=5, batch_size=8, seed=0)
