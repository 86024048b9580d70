"""The native engine's schedule, cache and stop rule, without a model."""

from collections.abc import Sequence

import pytest
import torch

from megappo.engines.native.cache import GROWTH, CacheShape, KVCache
from megappo.engines.native.schedule import GeneratedSequence, Schedule, SlotCopy, Step
from megappo.engines.native.stopping import StopRule
from megappo.engines.native.tokens import step_tokens
from megappo.engines.rollout import GenerationRequest, SamplingParams


def requests(*prompts: tuple[int, ...]) -> list[GenerationRequest]:
    return [GenerationRequest(prompt, key) for key, prompt in enumerate(prompts)]


def indices(sequences: tuple[GeneratedSequence, ...]) -> list[int]:
    return [sequence.index for sequence in sequences]


def append_token(step: Step, token: int = 9) -> None:
    for sequence in step.drawing:
        sequence.token_ids.append(token)


def test_requests_are_admitted_in_order_up_to_the_slots_and_the_padded_prompt_tokens():
    schedule = Schedule(requests((1, 2, 3), (4,), (5, 6), (7,), (8,)), max_num_seqs=4, max_num_batched_tokens=6)
    first = schedule.next_step()
    # Two prompts padded to three tokens are 6; a third would make 9.
    assert (indices(first.decoding), indices(first.prefilling)) == ([], [0, 1])
    append_token(first)
    second = schedule.next_step()
    assert (indices(second.decoding), indices(second.prefilling)) == ([0, 1], [2, 3])
    append_token(second)
    third = schedule.next_step()
    assert (indices(third.decoding), indices(third.prefilling)) == ([0, 1, 2, 3], [])


def test_a_prompt_longer_than_the_token_limit_runs_alone():
    schedule = Schedule(requests((1, 2, 3, 4, 5), (6,)), max_num_seqs=4, max_num_batched_tokens=2)
    assert indices(schedule.next_step().prefilling) == [0]


def test_responses_to_one_prompt_share_its_prefill():
    schedule = Schedule(requests((1, 2, 3), (1, 2, 3), (4, 5), (1, 2, 3)), max_num_seqs=8, max_num_batched_tokens=100)
    step = schedule.next_step()
    assert indices(step.prefilling) == [0, 2]
    # Slots: prefilled 0 and 2, then forked 1 and 3, which get all but the last token of the prompt.
    assert step.forks == (SlotCopy(0, 2, 2), SlotCopy(0, 3, 2))
    append_token(step)
    second = schedule.next_step()
    assert indices(second.decoding) == [0, 2, 1, 3]
    assert [sequence.last_token for sequence in second.decoding] == [9, 9, 3, 3]
    assert [sequence.length for sequence in second.decoding] == [4, 3, 3, 3]


def test_a_later_response_forks_from_one_that_is_still_decoding():
    schedule = Schedule(requests((1, 2), (1, 2), (1, 2)), max_num_seqs=2, max_num_batched_tokens=100)
    append_token(schedule.next_step())
    step = schedule.next_step()
    append_token(step)
    assert schedule.retire({step.decoding[0]}) == (SlotCopy(1, 0, 2),)
    third = schedule.next_step()
    assert (indices(third.decoding), third.prefilling, third.forks) == ([1], (), (SlotCopy(0, 1, 1),))


def test_retired_slots_are_filled_by_the_last_sequences():
    schedule = Schedule(requests((1,), (2, 2), (3,), (4, 4, 4), (5,)), max_num_seqs=5, max_num_batched_tokens=100)
    step = schedule.next_step()
    append_token(step)
    sequences = step.drawing
    # Slots 0, 2 and 4 fall free: slot 3 moves to slot 0, with the 3 positions that were computed.
    assert schedule.retire({sequences[0], sequences[2], sequences[4]}) == (SlotCopy(3, 0, 3),)
    assert indices(schedule.next_step().decoding) == [3, 1]
    append_token(schedule.next_step())
    assert schedule.retire({sequences[3], sequences[1]}) == ()
    assert schedule.is_finished


def test_several_schedules_share_slots_and_one_queue():
    asked = requests((1,), (2,), (3,), (4,), (5,), (6,), (7,))
    first, second, third = Schedule.several(asked, 3, max_num_seqs=5, max_num_batched_tokens=100)
    assert [each.max_num_seqs for each in (first, second, third)] == [2, 2, 1]
    steps = [each.next_step() for each in (first, second, third)]
    assert [indices(step.prefilling) for step in steps] == [[0, 1], [2, 3], [4]]
    for step in steps:
        append_token(step)
    # Whichever has a slot first takes the next of all.
    second.retire({steps[1].drawing[0]})
    assert indices(second.next_step().drawing) == [3, 5]
    third.retire(set(steps[2].drawing))
    assert indices(third.next_step().drawing) == [6]
    first.retire(set(steps[0].drawing))
    assert first.is_finished and not third.is_finished


@pytest.mark.parametrize(("num_requests", "max_num_seqs", "expected"), [(2, 9, [1, 1]), (9, 1, [1]), (9, 4, [2, 1, 1])])
def test_there_are_no_more_schedules_than_sequences(num_requests: int, max_num_seqs: int, expected: list[int]):
    found = Schedule.several(requests(*[(5,)] * num_requests), 3, max_num_seqs, max_num_batched_tokens=100)
    assert [each.max_num_seqs for each in found] == expected


def test_a_step_is_laid_out_flat_with_positions_slots_and_rows():
    schedule = Schedule(requests((1, 2), (3, 4, 5), (6,)), max_num_seqs=2, max_num_batched_tokens=2)
    append_token(schedule.next_step())
    tokens = step_tokens(schedule.next_step(), alignment=3, device=torch.device("cpu"))
    assert (tokens.num_tokens, tokens.num_decoding, tokens.longest_decoding) == (4, 1, 3)
    assert tokens.token_ids.tolist() == [9, 3, 4, 5, 0, 0]
    assert tokens.positions.tolist() == [2, 0, 1, 2, 0, 0]
    assert tokens.slots.tolist() == [0, 1, 1, 1]
    assert tokens.logit_rows.tolist() == [0, 3]
    assert tokens.is_visible.tolist() == [[[[True, True, True]]]]
    assert tokens.prefill is not None
    assert (tokens.prefill.first_slot, tokens.prefill.num_prompts, tokens.prefill.longest) == (1, 1, 3)
    assert (tokens.prefill.prompts.tolist(), tokens.prefill.positions.tolist()) == ([0, 0, 0], [0, 1, 2])


def test_decoding_sequences_see_their_own_length():
    schedule = Schedule(requests((1,), (2, 3, 4)), max_num_seqs=2, max_num_batched_tokens=100)
    append_token(schedule.next_step())
    tokens = step_tokens(schedule.next_step(), alignment=1, device=torch.device("cpu"))
    assert tokens.is_visible[:, 0, 0].tolist() == [[True, True, False, False], [True, True, True, True]]


def cache(max_length: int = 1000) -> KVCache:
    shape = CacheShape(num_layers=2, num_slots=3, num_kv_heads=2, head_dim=4, max_length=max_length)
    return KVCache(shape, torch.float32, torch.device("cpu"))


def test_the_cache_grows_in_length_and_keeps_what_it_holds():
    store = cache()
    store.reserve(5)
    assert store.capacity == 5 + GROWTH
    key, value = torch.randn(2, 2, 4), torch.randn(2, 2, 4)
    store.write(1, torch.tensor([0, 2]), torch.tensor([4, 1]), key, value)
    store.reserve(GROWTH + 6)
    assert store.capacity == 2 * GROWTH + 6
    assert torch.equal(store.layers[1][0][0, :, 4], key[0])
    assert torch.equal(store.layers[1][1][2, :, 1], value[1])
    assert [part.count_nonzero() for part in store.layers[0]] == [0, 0]
    assert [part.count_nonzero() for part in store.layers[1]] == [16, 16]


def test_the_cache_never_grows_over_what_was_planned():
    store = cache(max_length=20)
    store.reserve(5)
    assert store.capacity == 20
    with pytest.raises(AssertionError, match="planned for 20"):
        store.reserve(21)


def test_slots_are_copied_up_to_their_length():
    store = cache()
    store.reserve(5)
    parts = [part for layer in store.layers for part in layer]
    for part in parts:
        part.copy_(torch.randn_like(part))
    before = [part.clone() for part in parts]
    store.copy([SlotCopy(2, 0, 3)])
    for old, new in zip(before, parts, strict=True):
        assert torch.equal(new[0, :, :3], old[2, :, :3])
        assert torch.equal(new[0, :, 3:], old[0, :, 3:])
        assert torch.equal(new[1:], old[1:])


def decode(token_ids: Sequence[int]) -> str:
    return "".join(chr(token) for token in token_ids if token > 31)


@pytest.mark.parametrize(
    ("sampling", "text", "reason"),
    [
        (SamplingParams(max_tokens=9), "ab", None),
        (SamplingParams(max_tokens=2), "ab", "length"),
        (SamplingParams(max_tokens=9), "ab\x02", "stop"),
        (SamplingParams(max_tokens=3), "ab\x02", "stop"),
        (SamplingParams(max_tokens=9, ignore_eos=True), "ab\x02", None),
        (SamplingParams(max_tokens=9, stop_token_ids=(98,)), "ab", "stop"),
        (SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=(98,)), "ab", "stop"),
        (SamplingParams(max_tokens=999, stop=("bc",)), "xxxabc", "stop"),
        (SamplingParams(max_tokens=999, stop=("zz", "c")), "xxxabc", "stop"),
        (SamplingParams(max_tokens=999, stop=("bd",)), "xxxabc", None),
        (SamplingParams(max_tokens=999, stop=("cdef",)), "ab" * 100 + "cdef", "stop"),
    ],
)
def test_a_response_ends(sampling: SamplingParams, text: str, reason: str | None):
    assert StopRule(sampling, [2], decode).reason([ord(character) for character in text]) == reason


def test_stop_strings_cost_the_same_late_in_a_response():
    seen: list[int] = []

    def counting(token_ids: Sequence[int]) -> str:
        seen.append(len(token_ids))
        return decode(token_ids)

    rule = StopRule(SamplingParams(max_tokens=9999, stop=("####",)), [2], counting)
    for length in (10, 100, 1000):
        rule.reason([97] * length)
    assert seen == [10, 17, 17]  # 4 characters · 4 bytes + 1
