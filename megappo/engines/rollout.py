"""The protocol of a generation engine, and what goes in and out. Imports neither megatron nor vllm."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from megappo.experience.sample import FinishReason
from megappo.observe.memory import AbsentBytes


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
    """One response to generate, and who is told as soon as it is there, while others are still generated.

    `noise_key` fixes the sampling noise: with the native engine the same key, prompt and weights give the same tokens
    in any batch, on any layout; with vLLM in any batch if `rollout.seed_per_request` is set, otherwise in that batch.
    The trainer builds it from (seed, step, position). `max_tokens` is the request's own limit, instead of the
    sampling's.
    """

    prompt_ids: tuple[int, ...]
    noise_key: int
    max_tokens: int | None = None
    on_completion: Callable[["Completion"], None] | None = field(default=None, compare=False)

    def tell(self, completion: "Completion") -> None:
        """Engines call it once, on every rank of the group."""
        if self.on_completion is not None:
            self.on_completion(completion)


@dataclass(frozen=True)
class Completion:
    """The response to a request: token ids (with the end token where one was sampled), and the log-probability of each
    under the distribution that it was sampled from (after temperature, top-k and top-p).

    `mask` is false at tokens that an environment put in, whose log-probability is 0; None where there is no such token.
    Engines sample all of theirs. `routed_experts` [tokens of prompt and response, layers with experts, top_k] int16:
    where each token went, -1 where that is not known; None of engines that are not asked to record it.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    text: str
    finish_reason: FinishReason
    mask: tuple[bool, ...] | None = None
    routed_experts: Tensor | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Replicas:
    """Which ranks generate together: every rank is in one group, and a group answers its requests alone.

    Groups are in the order of their first ranks; a group's ranks are in the order of their places in it.
    """

    groups: tuple[tuple[int, ...], ...]

    def of(self, rank: int) -> int:
        """The number of the rank's group."""
        return next(number for number, group in enumerate(self.groups) if rank in group)


@dataclass(frozen=True)
class HeldBytes:
    """Bytes that the engine holds on this rank's device beside the training shards, at three points of a switch:
    before it (training's turn), with its weights in place, and ready to generate."""

    asleep: int = 0
    with_weights: int = 0
    awake: int = 0


@dataclass(frozen=True)
class SyncReport:
    """What a switch to generation moved on this rank, in bytes, and the seconds it took.

    `bytes_aliased` are parameters that are the training shard's own memory, `bytes_copied` copies on the device,
    `bytes_sent` and `bytes_received` what went over the wire. `peak_bytes` is the memory beyond parameters that the
    transfer took at once, `extra_bytes` the most that its plan allows (0 where whole tensors are streamed). Of the
    `seconds`, waking the engine included, `transfer_seconds` moved weights; `release_seconds` took the end of the turn
    before, in which the engine went to sleep.
    """

    bytes_aliased: int
    bytes_copied: int
    bytes_sent: int
    seconds: float
    bytes_received: int = 0
    peak_bytes: int = 0
    transfer_seconds: float = 0.0
    release_seconds: float = 0.0
    held: HeldBytes = HeldBytes()
    extra_bytes: int = 0

    def __add__(self, later: "SyncReport") -> "SyncReport":
        """Of both switches: what was moved and the seconds of both, the most memory of either, and what is held now."""
        return SyncReport(
            bytes_aliased=self.bytes_aliased + later.bytes_aliased,
            bytes_copied=self.bytes_copied + later.bytes_copied,
            bytes_sent=self.bytes_sent + later.bytes_sent,
            seconds=self.seconds + later.seconds,
            bytes_received=self.bytes_received + later.bytes_received,
            peak_bytes=max(self.peak_bytes, later.peak_bytes),
            transfer_seconds=self.transfer_seconds + later.transfer_seconds,
            release_seconds=self.release_seconds + later.release_seconds,
            held=later.held,
            extra_bytes=max(self.extra_bytes, later.extra_bytes),
        )


@dataclass(frozen=True, order=True)
class WorstTensor:
    """A parameter of an engine that is not what training has: its largest |difference|, infinite where it should be the
    same memory and is not, and its name. `note`: instead of that, why none can be named; the difference is 0 then."""

    difference: float
    name: str
    note: str = ""

    def __str__(self) -> str:
        return self.note or f"{self.name} (off by {self.difference:.3g} at most)"


Progress = Callable[[int, int], None]
"""Called with (finished requests, all requests) as generation goes on."""


@runtime_checkable
class ComparesTensors(Protocol):
    """A rollout engine that can say which of its tensors is wrong."""

    def worst_tensor(self) -> WorstTensor | None:
        """The engine's tensor that is farthest from the training shard's bytes on this rank; None where all are equal.
        Every rank of the world calls it together."""
        ...


@runtime_checkable
class CopiesWeights(Protocol):
    """An engine that may have weights of its own, and then calls `when_copied` in every `sync_weights`, on every rank:
    it needs those of training no more, until the next."""

    when_copied: Callable[[], None]


@runtime_checkable
class ReturnsMemory(Protocol):
    """An engine that takes memory of a GPU past torch's allocator, and gives it back between its turns."""

    @property
    def absent(self) -> AbsentBytes:
        """What it has given back of what torch counts as allocated."""
        ...


@runtime_checkable
class LendsMemory(Protocol):
    """An engine whose memory training can have for a while within the engine's turn."""

    def memory_lent(self) -> AbstractContextManager[None]:
        """While inside, nothing is generated; afterwards the engine has the weights of its turn. Every rank of the
        world calls it together, between `sync_weights` and `release`."""
        ...


class RolloutEngine(Protocol):
    """Generates on groups of ranks that take turns with training: `sync_weights`, `generate` …, `release`.

    Every rank of the world calls `sync_weights` and `release` together; the ranks of one group make the same
    `generate` calls, and groups may differ in requests and in the number of calls.
    """

    @property
    def replicas(self) -> Replicas:
        """Which ranks generate together."""
        ...

    def sync_weights(self) -> SyncReport:
        """Takes the turn to generate: makes the training weights of this moment the engine's own."""
        ...

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParams, progress: Progress | None = None
    ) -> list[Completion]:
        """Completions in the order of the requests, the same on every rank of the group."""
        ...

    def release(self) -> None:
        """Gives the turn back to training, with all memory that only generation needs."""
        ...

    def close(self) -> None:
        """Ends the engine, at the end of the run; the process groups are left as they are where that can be."""
        ...
