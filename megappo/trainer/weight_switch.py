"""The turn between training and generation, and the proof that the engine has the weights that were trained.

The engine moves the weights; here is when, and what is done where its log-probs are not the trainer's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NoReturn

from megappo.engines.rollout import SyncReport
from megappo.errors import WeightSwitchError
from megappo.experience.sample import Prompt
from megappo.parallel.collectives import gather_objects
from megappo.parallel.mesh import Mesh
from megappo.trainer.experience_metrics import sync_metrics
from megappo.trainer.probe import Probe, probe, worst_of_all
from megappo.workers.actor import ActorWorker
from megappo.workers.rollout import RolloutWorker

_log = logging.getLogger(__name__)


class WeightSwitch:
    """Gives the turn to the rollout engine and back. Every method is a collective call over the world.

    The first switch is checked, and one every `check_every` steps: a few of the run's prompts are answered by the
    engine, and its log-probs compared with those of the training shards. `limit` bounds the mean |difference|.
    """

    def __init__(
        self,
        rollout: RolloutWorker,
        actor: ActorWorker,
        prompts: Sequence[Prompt],
        mesh: Mesh,
        *,
        check_every: int,
        limit: float,
    ) -> None:
        self._rollout = rollout
        self._actor = actor
        self._prompts = prompts
        self._mesh = mesh
        self._check_every = check_every
        self._limit = limit
        self._is_first = True

    def to_rollout(self, step: int) -> dict[str, float]:
        """Makes the weights of this moment the engine's; returns the metrics `hybrid/…`, of both switches where the
        weights were sent twice.

        Raises WeightSwitchError where the engine still computes something else after the weights were sent twice.
        """
        report = self._rollout.sync_weights()
        checked: dict[str, float] = {}
        if self._is_first or self._is_due(step):
            self._is_first = False
            report, checked = self._check(step, report)
        return sync_metrics(report, self._mesh) | checked

    def to_training(self) -> None:
        self._rollout.release()

    def _is_due(self, step: int) -> bool:
        """By the step's number, so that a resumed run checks where it would have without the break."""
        return self._check_every > 0 and (step - 1) % self._check_every == 0

    def _check(self, step: int, report: SyncReport) -> tuple[SyncReport, dict[str, float]]:
        """What was moved in all, where `report` was at first, and the metrics of the check."""
        found = self._probe(step)
        is_resent = found.mean > self._limit
        if is_resent:
            _log.warning("step %d: %s; they are sent once more", step, self._complaint(found))
            self._rollout.release()
            report += self._rollout.sync_weights()
            found = self._probe(step)
        if found.mean > self._limit:
            self._give_up(step, found)
        return report, {
            "hybrid/probe_diff_mean": found.mean,
            "hybrid/probe_diff_max": found.max,
            "hybrid/probe_resent": float(is_resent),
        }

    def _probe(self, step: int) -> Probe:
        return probe(self._rollout, self._actor, self._prompts, self._mesh, step)

    def _complaint(self, found: Probe) -> str:
        return (
            "the rollout engine has not got the trained weights: its log-probs are on average "
            f"{found.mean:.3g} nats off the trainer's, hybrid.check_limit is {self._limit:g}"
        )

    def _give_up(self, step: int, found: Probe) -> NoReturn:
        token = worst_of_all(found.worst, self._mesh)
        found_on = enumerate(gather_objects(self._rollout.worst_tensor(), self._mesh.world_group))
        worst = max(((each, rank) for rank, each in found_on if each is not None), default=None)
        tensor = None if worst is None else f"{worst[0]}, on rank {worst[1]}"
        named = f"wrong tensor: {tensor}" if tensor is not None else "the engine names no tensor"
        raise WeightSwitchError(
            f"step {step}: {self._complaint(found)}, though they were sent twice; {named}; worst token: {token}"
        )
