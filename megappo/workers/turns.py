"""Responses of several turns: the engine generates a turn of every unfinished sequence, their environments answer.

What is asked, and in which turn's noise, is the rollout worker's. An engine sees one request a turn.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megappo.config.multi_turn import MultiTurnConfig
from megappo.data.replies import ReplyEncoder
from megappo.engines.rollout import Completion, GenerationRequest, Progress, RolloutEngine, SamplingParams
from megappo.environments.asking import Answer, Failure, Seat, ask_all
from megappo.environments.environment import Environment, Reply
from megappo.errors import DataError
from megappo.experience.sample import FinishReason, Prompt
from megappo.parallel.collectives import broadcast_object

_log = logging.getLogger(__name__)

Heard = list[list[int] | Failure | None]
"""Token ids of each reply; None where the environment has finished."""


@dataclass(eq=False)
class Dialogue:
    """One sequence on its way. `key(turn)` is the noise of a turn; `tell` hears of the whole response."""

    prompt: Prompt
    key: Callable[[int], int]
    seat: Seat
    tell: Callable[[Completion], None] | None
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    finish_reason: FinishReason = "stop"
    experts: Tensor | None = None

    def speak(self, completion: Completion) -> None:
        self.token_ids += completion.token_ids
        self.log_probs += completion.log_probs
        self.mask += [True] * len(completion.token_ids)
        self.finish_reason = completion.finish_reason
        self.experts = joined_experts(self.experts, completion.routed_experts)

    def hear(self, token_ids: Sequence[int]) -> None:
        self.token_ids += token_ids
        self.log_probs += [0.0] * len(token_ids)
        self.mask += [False] * len(token_ids)


@dataclass(frozen=True)
class ReplicaRanks:
    """The ranks that generate together: `leader` asks the environments, and `group` (None: it is alone) hears."""

    rank: int
    leader: int
    group: ProcessGroup | None


@dataclass(frozen=True)
class TurnTaking:
    """Generates with an engine and an environment. The ranks of a replica call it alike, replicas for themselves."""

    config: MultiTurnConfig
    environment: Callable[..., Environment]
    encoder: ReplyEncoder
    decode: Callable[[Sequence[int]], str]
    ranks: ReplicaRanks

    def dialogue(
        self, prompt: Prompt, key: Callable[[int], int], tell: Callable[[Completion], None] | None = None
    ) -> Dialogue:
        """A response to begin."""
        return Dialogue(prompt, key, Seat(self.environment, prompt), tell)

    def generate(
        self,
        engine: RolloutEngine,
        dialogues: Sequence[Dialogue],
        sampling: SamplingParams,
        progress: Progress | None = None,
    ) -> list[Completion]:
        """Whole responses, at most `sampling.max_tokens` tokens each with the environment's.

        Raises DataError, on all ranks of the replica alike, where a reply can't be put into tokens.
        """
        sampling = dataclasses.replace(sampling, stop=(*sampling.stop, *getattr(self.environment, "stop", ())))
        unfinished = list(dialogues)
        for turn in range(self.config.max_turns):
            if not unfinished:
                break
            completions = engine.generate(
                [self._request(one, turn, sampling.max_tokens) for one in unfinished], sampling, progress
            )
            for one, completion in zip(unfinished, completions, strict=True):
                one.speak(completion)
            going_on: list[Dialogue] = []
            if turn + 1 < self.config.max_turns:
                stopped = [number for number, one in enumerate(unfinished) if one.finish_reason == "stop"]
                waiting, turns = [unfinished[number] for number in stopped], [completions[number] for number in stopped]
                going_on = self._answered(waiting, turns, sampling.max_tokens)
            self._tell(set(unfinished) - set(going_on))
            unfinished = going_on
        return [self._completion(one) for one in dialogues]

    def _tell(self, finished: Iterable[Dialogue]) -> None:
        for one in finished:
            if one.tell is not None:
                one.tell(self._completion(one))

    def _request(self, dialogue: Dialogue, turn: int, budget: int) -> GenerationRequest:
        left = budget - len(dialogue.token_ids)
        limit = left if self.config.max_tokens_per_turn is None else min(left, self.config.max_tokens_per_turn)
        return GenerationRequest((*dialogue.prompt.token_ids, *dialogue.token_ids), dialogue.key(turn), limit)

    def _answered(self, waiting: Sequence[Dialogue], turns: Sequence[Completion], budget: int) -> list[Dialogue]:
        """Those that go on, with the reply's tokens. A reply that leaves no room for a token of the model is left out,
        and the response ends at its limit."""
        going_on = []
        for one, heard in zip(waiting, self._heard(waiting, turns), strict=True):
            if heard is None:
                continue
            if isinstance(heard, Failure):
                one.finish_reason = "error"
            elif len(one.token_ids) + len(heard) >= budget:
                one.finish_reason = "length"
            else:
                one.hear(heard)
                going_on.append(one)
        return going_on

    def _heard(self, waiting: Sequence[Dialogue], turns: Sequence[Completion]) -> Heard:
        """Token ids of each reply, the same on all ranks of the replica; None where the environment has finished."""
        here: tuple[Heard, DataError | None] = [], None
        if self.ranks.rank == self.ranks.leader:
            try:
                answers = ask_all(
                    [one.seat for one in waiting], [turn.text for turn in turns], self.config.timeout_seconds
                )
                here = [self._encoded(answer, turn) for answer, turn in zip(answers, turns, strict=True)], None
            except DataError as mistake:
                here = [], mistake
        if self.ranks.group is not None:
            here = broadcast_object(here, self.ranks.group, self.ranks.leader)
        heard, error = here
        if error is not None:
            raise error
        return heard

    def _encoded(self, answer: Answer, turn: Completion) -> list[int] | Failure | None:
        if isinstance(answer, Failure):
            _log.warning("an environment fails, and its sequence ends: %s", answer.error)
        if not isinstance(answer, Reply):
            return answer
        if answer.role is None:
            return self.encoder.text_ids(answer.text)
        return self.encoder.message_ids(answer.role, answer.text, turn.token_ids)

    def _completion(self, dialogue: Dialogue) -> Completion:
        return Completion(
            tuple(dialogue.token_ids),
            tuple(dialogue.log_probs),
            self.decode(dialogue.token_ids),
            dialogue.finish_reason,
            None if all(dialogue.mask) else tuple(dialogue.mask),
            dialogue.experts,
        )


def joined_experts(earlier: Tensor | None, later: Tensor | None) -> Tensor | None:
    """Those of a sequence after a further turn, [its tokens, layers, top_k]: of what `earlier` turns computed, all but
    their last token, the choices that their log-probs were made with, also where the turn has computed it again."""
    if earlier is None or later is None:
        return later
    known = len(earlier) - 1
    return torch.cat([earlier[:known], later[known:]])
