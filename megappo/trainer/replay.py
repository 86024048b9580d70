"""Replay: a step's sequences enter the buffer, and draws from it take the places of some of them in training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megappo.config.replay import ReplayConfig
from megappo.experience.batch import ExperienceBatch
from megappo.experience.replay import ReplayBuffer, joined, replaced_places, restored, stored
from megappo.parallel.collectives import gather_objects
from megappo.parallel.mesh import Mesh
from megappo.trainer.advantages import AdvantagePhase
from megappo.trainer.loop import Step
from megappo.workers.critic import CriticWorker, NoCritic


class NoReplay:
    """Trains on the fresh sequences alone."""

    def mix(self, fresh: ExperienceBatch, step: Step) -> ExperienceBatch:
        return fresh


@dataclass(frozen=True)
class Replay:
    """Trains on a mixture of fresh and drawn sequences; advantages are those of the mixture."""

    buffer: ReplayBuffer
    config: ReplayConfig
    mesh: Mesh
    critic: CriticWorker | NoCritic
    advantages: AdvantagePhase
    num_prompts: int
    num_samples: int

    def mix(self, fresh: ExperienceBatch, step: Step) -> ExperienceBatch:
        """The batch to train on, as large as `fresh`, in which draws stand in the places of some fresh sequences.

        A draw can be of this step. A collective call: all ranks hold the same buffer.
        """
        own = stored(fresh, step.number, lambda position: self._group(step.number, position))
        parts = gather_objects(own, self.mesh.dp_group)
        everything = sorted((row for part in parts for row in part), key=lambda row: row[0])
        self.buffer.push([sequence for _, sequence in everything])
        positions = [position for position, _ in everything]
        places = [positions[number] for number in replaced_places(positions, self.config.fraction)]
        drawn = dict(zip(places, self.buffer.draw(len(places), step.number), strict=False))
        sequences = {identity: self.buffer.read(identity) for identity in set(drawn.values())}
        step.record(
            {
                "replay/size": float(len(self.buffer)),
                "replay/drawn": float(len(drawn)),
                "replay/distinct": float(len(sequences)),
                "replay/score": mean([sequences[identity].score for identity in drawn.values()]),
                "replay/age": mean([step.number - sequences[identity].step for identity in drawn.values()]),
            }
        )
        if not drawn:
            return fresh
        rows = [
            restored(sequences[drawn[position]], position, step.number)
            if position in drawn
            else fresh.rows(index, index + 1)
            for index, position in enumerate(fresh.positions.tolist())
        ]
        # The critic sees all rows again, not the drawn ones alone: experts that data-parallel ranks share need as many
        # forward passes on each of them.
        return self.advantages.fill(self.critic.fill_values(joined(rows)))

    def save(self, path: Path) -> None:
        self.buffer.save(path)

    def load(self, path: Path) -> None:
        self.buffer.load(path)

    def _group(self, step: int, position: int) -> int:
        return step * self.num_prompts + position // self.num_samples


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
