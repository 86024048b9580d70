"""From `trainer.kind` to the trainer that is meant, after the whole configuration has been checked."""

from __future__ import annotations

from collections.abc import Callable

from megappo.config.checks import require_sound
from megappo.config.experiment import ExperimentConfig
from megappo.parallel.mesh import Mesh
from megappo.trainer.build import build_ppo
from megappo.trainer.build_offline import build_dpo, build_reward_model, build_supervised
from megappo.trainer.offline import OfflineTrainer
from megappo.trainer.ppo import PPOTrainer

Builder = Callable[[ExperimentConfig, Mesh], PPOTrainer | OfflineTrainer]

BUILDERS: dict[str, Builder] = {
    "ppo": build_ppo,
    "sft": build_supervised,
    "reward_model": build_reward_model,
    "dpo": build_dpo,
}
"""`trainer.kind` → what builds its trainer."""


def build_trainer(config: ExperimentConfig, mesh: Mesh) -> PPOTrainer | OfflineTrainer:
    """The trainer of the configuration, ready to `fit`. Raises UserError before a model is built where it can."""
    require_sound(config, mesh.world_size)
    return BUILDERS[config.trainer.kind](config, mesh)
