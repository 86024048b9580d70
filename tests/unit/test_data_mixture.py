"""Prompt sets that are mixed, the feed that works ahead, and prompts that are kept as text."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megappo.config.data import DataConfig
from megappo.data.feed import PromptFeed
from megappo.data.iterate import PromptOrder
from megappo.data.mixture import MixedOrder, SetSize
from megappo.data.render import PromptRenderer
from megappo.data.text_prompts import TextPrompts
from megappo.data.tokenizer import load_tokenizer
from megappo.errors import DataError
from megappo.experience.sample import Prompt
from tests.support.tokenizers import char_ids, save_tokenizer

SETS = [SetSize("sums", 10, 3.0), SetSize("words", 4, 1.0), SetSize("rare", 100, 0.5)]


def mixed(sets: list[SetSize] = SETS, seed: int = 0) -> MixedOrder:
    return MixedOrder(sets, batch_size=6, seed=seed)


def test_every_set_has_its_share_at_any_time() -> None:
    order = mixed()
    counts: Counter[str] = Counter()
    for step in range(1, 31):
        batch = order.next_batch()
        assert len(batch) == 6
        counts.update("sums" if row < 10 else "words" if row < 14 else "rare" for row in batch)
        for one in SETS:
            assert abs(counts[one.name] - 6 * step * one.weight / 4.5) < 1
    assert order.prompts_seen == 180 and order.epoch == 1  # of 114 prompts


def test_a_set_gives_each_prompt_before_any_twice() -> None:
    order = mixed([SetSize("a", 5, 1.0), SetSize("b", 3, 1.0)])
    rows = [row for _ in range(10) for row in order.next_batch()]
    of_b = [row for row in rows if row >= 5]
    assert len(of_b) == 30
    assert all(sorted(of_b[start : start + 3]) == [5, 6, 7] for start in range(0, 30, 3))


def test_a_mixture_resumes_and_refuses_another() -> None:
    order = mixed()
    for _ in range(7):
        order.next_batch()
    state = order.state_dict()
    rest = [order.next_batch() for _ in range(5)]
    again = mixed()
    again.load_state_dict(state)
    assert [again.next_batch() for _ in range(5)] == rest
    with pytest.raises(DataError, match="resume with the same data"):
        mixed([*SETS[:2], SetSize("rare", 100, 1.0)]).load_state_dict(state)
    with pytest.raises(DataError, match="has seed 0, this run has 1"):
        mixed(seed=1).load_state_dict(state)
    with pytest.raises(DataError, match="has shuffle True, this run has False"):
        MixedOrder(SETS, batch_size=6, seed=0, shuffle=False).load_state_dict(state)
    with pytest.raises(DataError, match="mixes the prompt sets of no data"):
        mixed().load_state_dict(PromptOrder(10, 2, seed=0).state_dict())


def prompts(count: int) -> list[Prompt]:
    return [Prompt(index, "made", (index,), str(index)) for index in range(count)]


def test_working_ahead_changes_neither_order_nor_place() -> None:
    feeds = [PromptFeed(prompts(10), PromptOrder(10, 3, seed=5), ahead=ahead) for ahead in (False, True)]
    places: list[list[Any]] = [[], []]
    for number, feed in enumerate(feeds):
        for _ in range(8):
            batch = [prompt.index for prompt in feed.next_batch()]
            places[number].append((batch, feed.state_dict(), feed.epoch, feed.prompts_seen))
    assert places[0] == places[1]
    state = places[0][3][1]
    for feed in feeds:
        feed.load_state_dict(state)
        assert feed.prompts_seen == places[0][3][3]
        assert [prompt.index for prompt in feed.next_batch()] == places[0][4][0]


def test_what_goes_wrong_ahead_is_raised_where_it_is_asked_for() -> None:
    feed = PromptFeed(prompts(2), PromptOrder(6, 2, seed=0, shuffle=False), ahead=True)
    assert len(feed.next_batch()) == 2
    with pytest.raises(IndexError):
        feed.next_batch()


def test_prompts_kept_as_text_have_the_same_tokens(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, add_bos=True))
    data = DataConfig(train_files=("a",), train_batch_size=1, max_prompt_length=8, max_response_length=4)
    made = [Prompt(0, "s", (1, *char_ids("3+4=")), "3+4="), Prompt(1, "s", tuple(char_ids("abcdefgh")), "abcdefgh")]
    kept = TextPrompts(made, PromptRenderer(data, tokenizer), limit=8)
    assert len(kept) == 2 and list(kept) == made  # the second may have been cut: it keeps its tokens
    assert kept._prompts[0].token_ids == ()
