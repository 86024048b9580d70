"""One generated trajectory, before it is batched. Imports no torch: reward processes read this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "error"]
"""`stop` of the model or of its environment, `length` at a token limit, `error` of the environment."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of the data set, tokenised.

    `index` is the row in its data set; `source` names the data set; `answer` is the ground truth that rule rewards
    compare with; `extra` holds the row's other columns, as read. `messages` is the prompt before it was rendered, as
    chat turns with `role`, `content` and what else the row's turns have (a string is one user's turn), for models with
    another template.
    """

    index: int
    source: str
    token_ids: tuple[int, ...]
    text: str
    answer: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class GreedyScore:
    """What the greedy response to a prompt got: the sequence's `score` and the sum of its tokens' rewards; `length` is
    its number of tokens, for which shaping may take something off."""

    score: float
    token_score: float
    length: int


@dataclass(frozen=True)
class RolloutSample:
    """A prompt and one response to it.

    `position` is the sequence's place in the step's global batch (prompt · n + sample), `sample` its number among the n
    responses. `response_ids` ends with the end-of-sequence token where `finish_reason` is "stop" because of it;
    `rollout_log_probs` has one float a response token, in nats, of the distribution that was sampled from.
    `mask` is false at response tokens that an environment put in, whose log-prob is 0; None: all are the policy's.
    `routed_experts` [tokens of prompt and response, layers with experts, top_k] int16: the experts that each token went
    to at generation, -1 where that is not known.
    `greedy` is of the greedy response to the same prompt, where the advantage estimator compares with it.
    """

    prompt: Prompt
    position: int
    sample: int
    response_ids: tuple[int, ...]
    rollout_log_probs: tuple[float, ...]
    text: str
    finish_reason: FinishReason
    mask: tuple[bool, ...] | None = None
    greedy: GreedyScore | None = None
    routed_experts: Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt.token_ids) + len(self.response_ids)

    @property
    def num_policy_tokens(self) -> int:
        """Tokens of the response that the policy produced."""
        return len(self.response_ids) if self.mask is None else sum(self.mask)

    @property
    def num_turns(self) -> int:
        """Turns of the policy: runs of its tokens."""
        mask = self.mask if self.mask is not None else (True,) * len(self.response_ids)
        return sum(own and not before for before, own in zip((False, *mask), mask, strict=False))
