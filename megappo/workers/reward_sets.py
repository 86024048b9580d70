"""Rewards of several prompt sets: each sample is scored by the parts of its own set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megappo.experience.sample import RolloutSample
from megappo.workers.reward import RewardWorker, ScoredSamples
from megappo.workers.scored_rows import joined_rows, taken


class SetRewards:
    """A reward worker for each prompt set, by the set's name, which is the `source` of its prompts.

    `files` has the one of each held-out file that is of no set, by the file's name in the metrics.
    """

    def __init__(self, workers: Mapping[str, RewardWorker], files: Mapping[str, RewardWorker] | None = None) -> None:
        self._workers = workers
        self._files = files or {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._workers)

    def score(self, samples: Sequence[RolloutSample]) -> ScoredSamples:
        """Like a `RewardWorker`; a part that is not the set's is NaN. Every rank asks all sets, in their order."""
        rows: list[int] = []
        lots: list[ScoredSamples] = []
        for name, worker in self._workers.items():
            own = [row for row, sample in enumerate(samples) if sample.prompt.source == name]
            lots.append(worker.score([samples[row] for row in own]))
            rows += own
        assert len(rows) == len(samples), "every prompt is of a set that has a reward"
        place = {row: number for number, row in enumerate(rows)}
        return taken(joined_rows(lots), [place[row] for row in range(len(samples))])

    def begin(self, sample: RolloutSample) -> None:
        """Like a `RewardWorker`."""
        self._workers[sample.prompt.source].begin(sample)

    def in_training(self) -> SetRewards:
        """As for a `RewardWorker`, which closes what it gives out; held-out files are none of its business."""
        return SetRewards({name: worker.in_training() for name, worker in self._workers.items()})

    def held_out(self, name: str) -> RewardWorker:
        """The worker of one data set of the evaluation: a file of no set, or the held-out prompts of a set. A file may
        have the name of a set without such prompts."""
        return self._files[name] if name in self._files else self._workers[name]

    def close(self) -> None:
        workers = [*self._workers.values(), *self._files.values()]
        for worker in {id(worker): worker for worker in workers}.values():
            worker.close()
