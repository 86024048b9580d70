"""The tensors of one step: which tokens go through the model, at which positions, and into which cache slots."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.engines.native.schedule import Step


@dataclass(frozen=True)
class PrefillTokens:
    """The prompts of a step, in `num_prompts` slots from `first_slot` on, padded to `longest` for attention.

    `prompts` and `positions` [prompt tokens] say where each flat token lies in the padded [num_prompts, longest] view.
    """

    first_slot: int
    num_prompts: int
    longest: int
    prompts: Tensor
    positions: Tensor


@dataclass(frozen=True)
class StepTokens:
    """The flat tokens of a step: one of each decoding sequence, then whole prompts, then padding.

    `token_ids` and `positions` [padded] (padding is token 0 at position 0, and reaches neither cache nor logits);
    `slots` [num_tokens]; `logit_rows` [decoding + prompts]: the rows that a next token is drawn from, in slot order.
    `is_visible` [num_decoding, 1, 1, longest_decoding] bool: the cache positions that a decoding sequence attends to.
    """

    num_tokens: int
    num_decoding: int
    longest_decoding: int
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    logit_rows: Tensor
    is_visible: Tensor
    prefill: PrefillTokens | None


def step_tokens(step: Step, alignment: int, device: torch.device) -> StepTokens:
    """Lays out `step`, padded to a multiple of `alignment` tokens (the TP size under sequence parallelism)."""
    num_decoding = len(step.decoding)
    token_ids = [sequence.last_token for sequence in step.decoding]
    positions = [sequence.length - 1 for sequence in step.decoding]
    slots = list(range(num_decoding))
    rows = list(range(num_decoding))
    for slot, sequence in enumerate(step.prefilling, num_decoding):
        token_ids += sequence.prompt_ids
        positions += range(len(sequence.prompt_ids))
        slots += [slot] * len(sequence.prompt_ids)
        rows.append(len(token_ids) - 1)
    num_tokens = len(token_ids)
    padding = [0] * (-num_tokens % alignment)
    # One transfer for all of them.
    table = torch.tensor([token_ids + padding, positions + padding, slots + padding], dtype=torch.int64).to(device)
    longest_decoding = max((sequence.length for sequence in step.decoding), default=0)
    cache_positions = torch.arange(longest_decoding, device=device)
    return StepTokens(
        num_tokens=num_tokens,
        num_decoding=num_decoding,
        longest_decoding=longest_decoding,
        token_ids=table[0],
        positions=table[1],
        slots=table[2, :num_tokens],
        logit_rows=torch.tensor(rows, dtype=torch.int64).to(device),
        is_visible=(cache_positions <= table[1, :num_decoding, None])[:, None, None, :],
        prefill=_prefill_tokens(step, table[:, num_decoding:num_tokens]) if step.prefilling else None,
    )


def _prefill_tokens(step: Step, table: Tensor) -> PrefillTokens:
    """`table`: token ids, positions and slots of the prompt tokens, [3, prompt tokens]."""
    first_slot = len(step.decoding)
    longest = max(len(sequence.prompt_ids) for sequence in step.prefilling)
    return PrefillTokens(first_slot, len(step.prefilling), longest, table[2] - first_slot, table[1])
