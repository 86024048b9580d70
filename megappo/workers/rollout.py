"""The rollout worker: this data-parallel rank's share of a step's responses, and of an evaluation's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from megappo.engines.rollout import Completion, GenerationRequest, Progress, RolloutEngine, SamplingParams, SyncReport
from megappo.experience.sample import Prompt, RolloutSample


class RolloutWorker:
    """Turns prompts into samples with a generation engine.

    `seed` and the place of a sequence in the step fix its sampling noise, whatever rank generates it.
    """

    def __init__(self, engine: RolloutEngine, sampling: SamplingParams, *, num_samples: int, seed: int) -> None:
        self._engine = engine
        self._sampling = sampling
        self._num_samples = num_samples
        self._seed = seed

    def generate(
        self, prompts: Sequence[Prompt], positions: Sequence[int], step: int, progress: Progress | None = None
    ) -> list[RolloutSample]:
        """Samples of the step's sequences at `positions` (prompt · n + sample), in that order."""
        return self.sample(prompts, positions, self._sampling, self._num_samples, (step,), progress)

    def sample(
        self,
        prompts: Sequence[Prompt],
        positions: Sequence[int],
        sampling: SamplingParams,
        num_samples: int,
        stream: tuple[int, ...],
        progress: Progress | None = None,
    ) -> list[RolloutSample]:
        """Like `generate` with any sampling; `stream` names the noise (training steps and evaluations differ)."""
        requests = [
            GenerationRequest(prompts[position // num_samples].token_ids, noise_key(self._seed, *stream, position))
            for position in positions
        ]
        completions = self._engine.generate(requests, sampling, progress)
        return [
            _sample(prompts[position // num_samples], position, position % num_samples, completion)
            for position, completion in zip(positions, completions, strict=True)
        ]

    def sync_weights(self) -> SyncReport:
        return self._engine.sync_weights()


def noise_key(*parts: int) -> int:
    """A 63-bit key that depends on every part."""
    return int(numpy.random.SeedSequence(parts).generate_state(1, numpy.uint64)[0] >> numpy.uint64(1))


def _sample(prompt: Prompt, position: int, sample: int, completion: Completion) -> RolloutSample:
    return RolloutSample(
        prompt=prompt,
        position=position,
        sample=sample,
        response_ids=completion.token_ids,
        rollout_log_probs=completion.log_probs,
        text=completion.text,
        finish_reason=completion.finish_reason,
    )
