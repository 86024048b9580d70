"""Evaluation on held-out preference pairs: how often the chosen response is worth more than the rejected one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from megappo.algorithms.preferences import PairLoss
from megappo.engines.rollout import Progress
from megappo.parallel.collectives import sum_over
from megappo.parallel.mesh import Mesh

Pair = TypeVar("Pair")


@dataclass(frozen=True)
class PairEvaluator(Generic[Pair]):
    """Measures pairs, every data-parallel rank every dp-th one."""

    mesh: Mesh
    sets: Mapping[str, Sequence[Pair]]
    measure: Callable[[Sequence[Pair]], PairLoss]

    def run(self, progress: Progress | None = None) -> dict[str, float]:
        """`eval/<set>/{accuracy,margin,loss}`, equal on every rank. A collective call."""
        metrics: dict[str, float] = {}
        for number, (name, pairs) in enumerate(self.sets.items()):
            metrics |= {f"eval/{name}/{key}": value for key, value in self._means(pairs).items()}
            if progress is not None:
                progress(number + 1, len(self.sets))
        return metrics

    def close(self) -> None:
        """Nothing was started."""

    def _means(self, pairs: Sequence[Pair]) -> dict[str, float]:
        share = -(-len(pairs) // self.mesh.dp)
        mine = list(pairs[self.mesh.dp_rank :: self.mesh.dp])
        # Equal numbers of passes on all ranks: experts exchange tokens between them.
        loss = self.measure(mine + [pairs[0]] * (share - len(mine)))
        told = torch.stack([loss.accuracy, loss.margin, loss.per_pair])[:, : len(mine)].double().sum(1)
        accuracy, margin, value = (sum_over(self.mesh.dp_group, self.mesh.device)(told) / len(pairs)).tolist()
        return {"accuracy": accuracy, "margin": margin, "loss": value}
