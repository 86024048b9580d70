"""The rollout worker: this data-parallel rank's samples of a step, whichever ranks generate together.

Which replica generates what is in `dealing.py`, how responses travel in `responses.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy
import torch

from megappo.engines.offload import RoleMemory
from megappo.engines.rollout import (
    ComparesTensors,
    Completion,
    CopiesWeights,
    GenerationRequest,
    HeldBytes,
    LendsMemory,
    Progress,
    ReturnsMemory,
    RolloutEngine,
    SamplingParams,
    SyncReport,
    WorstTensor,
)
from megappo.errors import UserError
from megappo.experience.sample import Prompt, RolloutSample
from megappo.observe.memory import AbsentBytes
from megappo.parallel.collectives import any_rank, gather_objects, sum_over
from megappo.parallel.mesh import Mesh
from megappo.workers.dealing import deal, plan_delivery
from megappo.workers.responses import exchange_completions
from megappo.workers.turns import TurnTaking

OnSample = Callable[[RolloutSample], None]


class RolloutWorker:
    """Turns prompts into samples with a generation engine.

    `seed` and the place of a sequence in the step fix its sampling noise, whatever rank generates it. Every rank of the
    world makes the same calls, each with the positions of its data-parallel rank.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        sampling: SamplingParams,
        mesh: Mesh,
        *,
        num_samples: int,
        seed: int,
        on_sample: OnSample | None = None,
        turns: TurnTaking | None = None,
        experts: tuple[int, int] | None = None,
        weights: RoleMemory | None = None,
    ) -> None:
        """`turns` are those with an environment. `on_sample` is told each training sample as soon as it is there,
        where this rank's replica is its copy of the model; elsewhere samples are not this rank's own before all have
        been exchanged. `experts`: (layers, top_k) of the experts that the engine records with its completions.
        `weights` is the memory of the role that generates: its parameters stay on the device for the whole turn where
        the engine uses them where they lie, and until it has copied them elsewhere."""
        self.engine = engine
        self.absent = engine.absent if isinstance(engine, ReturnsMemory) else AbsentBytes()
        """What a sleeping engine has given back of what torch counts as allocated."""
        self._on_sample = on_sample
        self.sampling = sampling
        self._mesh = mesh
        self._num_samples = num_samples
        self._seed = seed
        self._turns = turns
        self._experts = experts
        self._weights = weights
        copies = {tuple(sorted(mesh.grid[:, dp_rank].flatten().tolist())) for dp_rank in range(mesh.dp)}
        self._needs_exchange = {tuple(sorted(group)) for group in engine.replicas.groups} != copies
        if weights is not None and isinstance(engine, CopiesWeights):
            engine.when_copied = self._give_weights_back

    def generate(
        self,
        prompts: Sequence[Prompt],
        positions: Sequence[int],
        step: int,
        progress: Progress | None = None,
        batch: int = 0,
    ) -> list[RolloutSample]:
        """Samples of the step's sequences at `positions` (prompt · n + sample), in that order; `batch` numbers the
        batches of prompts of one step, from 0."""
        return self.sample(
            prompts, positions, self.sampling, self._num_samples, (step,), progress, self._on_sample, batch=batch
        )

    def sample(
        self,
        prompts: Sequence[Prompt],
        positions: Sequence[int],
        sampling: SamplingParams,
        num_samples: int,
        stream: tuple[int, ...],
        progress: Progress | None = None,
        on_sample: OnSample | None = None,
        *,
        batch: int = 0,
        with_environment: bool = True,
    ) -> list[RolloutSample]:
        """Like `generate` with any sampling; `stream` names the noise (training steps and evaluations differ).

        Without environment a response is one turn. Raises the UserError of any rank on all of them, and
        FloatingPointError where an engine computes no numbers.
        """
        listener = None if self._needs_exchange else on_sample
        work = _Work(prompts, num_samples, sampling, (self._seed, *stream), batch, with_environment, listener)
        if self._needs_exchange:
            completions = self._exchanged(work, positions, progress)
        else:
            completions = self._generated(work, positions, progress)
        return [
            _sample(prompts[position // num_samples], position, position % num_samples, completions[position])
            for position in positions
        ]

    def sync_weights(self) -> SyncReport:
        """Takes the turn to generate: responses come after it. Raises the engine's ConfigError on all ranks."""
        if self._weights is None:
            return self.engine.sync_weights()
        self._weights.hold("params")
        gathered = self._weights.gathered_bytes
        report, kept = self.engine.sync_weights(), self._weights.gathered_bytes
        if not gathered:
            return report
        held = report.held
        return replace(report, held=HeldBytes(held.asleep, held.with_weights + gathered, held.awake + kept))

    def worst_tensor(self) -> WorstTensor | None:
        """The engine's parameter that differs most from training's, which are back for that until `release`; None where
        all are equal, or the engine can't tell. Every rank of the world calls it, after `sync_weights`."""
        if not isinstance(self.engine, ComparesTensors):
            return None
        if self._weights is not None:
            self._weights.let_go("params")
            self._weights.hold("params")
        return self.engine.worst_tensor()

    def _give_weights_back(self) -> None:
        """Generation goes on without training's parameters: those that are offloaded, or cut, make room."""
        assert self._weights is not None, "the engine was told of nothing"
        self._weights.let_go("params")
        self._weights.rest()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the engine takes memory that is not torch's; waits for the copies

    @contextmanager
    def memory_lent(self) -> Iterator[None]:
        """While inside, training computes in the engine's turn, with what memory the engine can spare. Every rank of
        the world calls it, after `sync_weights`; an exception ends the turn."""
        if not isinstance(self.engine, LendsMemory):
            yield
            return
        with self.engine.memory_lent():
            yield
            if self._weights is not None and isinstance(self.engine, CopiesWeights):
                self._weights.rest()  # what was brought back for it makes room

    def release(self) -> None:
        """Gives the turn back to training."""
        if self._weights is not None and isinstance(self.engine, CopiesWeights):
            self._weights.rest()  # what a check brought back would pass for the engine's
        self.engine.release()
        if self._weights is not None:
            self._weights.let_go("params")

    def close(self) -> None:
        """Ends the engine, which may take the process groups with it."""
        self.engine.close()

    def _exchanged(self, work: _Work, positions: Sequence[int], progress: Progress | None) -> Mapping[int, Completion]:
        """Deals the sequences of all data-parallel ranks to the replicas, and fetches those at `positions`."""
        mesh, replicas = self._mesh, self.engine.replicas
        wanted = gather_objects(list(positions), mesh.dp_group)
        costs = {position: work.cost(position) for part in wanted for position in part}
        dealt = deal(costs, work.num_samples, len(replicas.groups))
        own = dealt[replicas.of(mesh.rank)]
        completions = self._generated(work, own, _scaled(progress, len(own), len(costs)))
        delivery = plan_delivery(mesh.rank, mesh.grid, replicas, dealt, wanted)
        return exchange_completions(own, completions, delivery, mesh, self._experts)

    def _generated(self, work: _Work, positions: Sequence[int], progress: Progress | None) -> dict[int, Completion]:
        """Completions of the rank's own replica, by position. A collective call over the world."""
        error: UserError | FloatingPointError | None = None
        completions: list[Completion] = []
        try:
            if positions:
                completions = self._responses(work, positions, progress)
        except (UserError, FloatingPointError) as mistake:
            error = mistake
        _raise_alike(error, self._mesh)
        return dict(zip(positions, completions, strict=True))

    def _responses(self, work: _Work, positions: Sequence[int], progress: Progress | None) -> list[Completion]:
        if self._turns is None or not work.with_environment:
            return self.engine.generate(list(map(work.request, positions)), work.sampling, progress)
        dialogues = [
            self._turns.dialogue(work.prompt(position), partial(work.key, position), work.listener(position))
            for position in positions
        ]
        return self._turns.generate(self.engine, dialogues, work.sampling, progress)

    def turn_metrics(self, samples: Sequence[RolloutSample]) -> dict[str, float]:
        """`rollout/…` of responses of several turns; nothing without an environment. A collective call."""
        if self._turns is None:
            return {}
        local = torch.tensor(
            [
                len(samples),
                sum(sample.num_turns for sample in samples),
                sum(sample.mask.count(False) for sample in samples if sample.mask is not None),
                sum(sample.finish_reason == "error" for sample in samples),
            ],
            dtype=torch.float64,
        )
        count, turns, tokens, errors = sum_over(self._mesh.dp_group, self._mesh.device)(local).tolist()
        return {
            "rollout/turns": turns / max(count, 1),
            "rollout/environment_tokens": tokens / max(count, 1),
            "rollout/environment_errors": errors,
        }


@dataclass(frozen=True)
class _Work:
    """The sequences of one call: prompts, samples of each, and what their noise depends on."""

    prompts: Sequence[Prompt]
    num_samples: int
    sampling: SamplingParams
    stream: tuple[int, ...]
    batch: int
    with_environment: bool
    on_sample: OnSample | None = None

    def request(self, position: int) -> GenerationRequest:
        return GenerationRequest(
            self.prompt(position).token_ids, self.key(position, 0), on_completion=self.listener(position)
        )

    def key(self, position: int, turn: int) -> int:
        """The noise of a turn; the first one's is that of a response of one turn."""
        if self.batch:
            return noise_key(*self.stream, position, spawned=(self.batch, turn))
        return noise_key(*self.stream, position, *((turn,) if turn else ()))

    def listener(self, position: int) -> Callable[[Completion], None] | None:
        tell = self.on_sample
        if tell is None:
            return None
        sample = position % self.num_samples
        return lambda completion: tell(_sample(self.prompt(position), position, sample, completion))

    def cost(self, position: int) -> int:
        """Tokens of the sequence at its longest."""
        return len(self.prompt(position).token_ids) + self.sampling.max_tokens

    def prompt(self, position: int) -> Prompt:
        return self.prompts[position // self.num_samples]


def noise_key(*parts: int, spawned: tuple[int, ...] = ()) -> int:
    """A 63-bit key that depends on every part, but for zeros at the end: numpy fills `parts` up to four words with 0.

    It writes `spawned` behind those four words, or behind all parts where they are more, with its zeros: two spawned
    numbers after (seed, step, position) can't be taken for anything that has one number more, or none.
    """
    sequence = numpy.random.SeedSequence(parts, spawn_key=spawned)
    return int(sequence.generate_state(1, numpy.uint64)[0] >> numpy.uint64(1))


def _raise_alike(error: Exception | None, mesh: Mesh) -> None:
    """Raises the first rank's error on every rank, so that none waits for one that has left."""
    if any_rank(error is not None, mesh):
        errors = gather_objects(error, mesh.world_group)
        raise next(mistake for mistake in errors if mistake is not None)


def _scaled(progress: Progress | None, own: int, total: int) -> Progress | None:
    """Progress over all `total` sequences, as far as a replica with `own` of them can tell: the others' work is as
    much as its own, and asking them would cost a collective."""
    if progress is None or own == 0:
        return None
    return lambda done, _: progress(done * total // own, total)


def _sample(prompt: Prompt, position: int, sample: int, completion: Completion) -> RolloutSample:
    return RolloutSample(
        prompt=prompt,
        position=position,
        sample=sample,
        response_ids=completion.token_ids,
        rollout_log_probs=completion.log_probs,
        text=completion.text,
        finish_reason=completion.finish_reason,
        mask=completion.mask,
        routed_experts=completion.routed_experts,
    )
