"""The protocol of a generation engine, and what goes in and out. Imports neither megatron nor vllm."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megappo.experience.sample import FinishReason


@dataclass(frozen=True)
class SamplingParams:
    """How a request is sampled. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class GenerationRequest:
    """One response to generate.

    `noise_key` fixes the sampling noise: the same key, prompt and weights give the same tokens in any batch, on any
    layout. The trainer builds it from (seed, step, position).
    """

    prompt_ids: tuple[int, ...]
    noise_key: int


@dataclass(frozen=True)
class Completion:
    """The response to a request: token ids (with the end token where one was sampled), and the log-probability of each
    under the distribution that it was sampled from (after temperature, top-k and top-p)."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    text: str
    finish_reason: FinishReason


@dataclass(frozen=True)
class SyncReport:
    """What a weight sync moved on this rank, in bytes, and the seconds it took."""

    bytes_aliased: int
    bytes_copied: int
    bytes_sent: int
    seconds: float


Progress = Callable[[int, int], None]
"""Called with (finished requests, all requests) as generation goes on."""


class RolloutEngine(Protocol):
    """Generates on the ranks of one model-parallel group; every rank of the group makes the same calls."""

    def sync_weights(self) -> SyncReport:
        """Makes the training weights of this moment the engine's own."""
        ...

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParams, progress: Progress | None = None
    ) -> list[Completion]:
        """Completions in the order of the requests, the same on every rank of the group."""
        ...
