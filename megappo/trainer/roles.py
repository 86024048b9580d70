"""Builds the models of a run: spec and weights from Hugging Face folders, engines around them.

Nothing else builds one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel

from megappo.config.experiment import ExperimentConfig
from megappo.config.lora import LoraConfig
from megappo.config.optim import OptimConfig
from megappo.engines.optimizer import Optimizer
from megappo.engines.training import BaseEngine, ModelEngine, TrainingEngine
from megappo.models.attach_lora import attach_lora
from megappo.models.build import ModelSpec, build_model, read_model
from megappo.models.import_hf import import_hf
from megappo.models.weight_map import Head
from megappo.parallel.mesh import Mesh

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class TrainedRole:
    """A trained model: its engine, and the bare stage that checkpoints and exports read."""

    engine: TrainingEngine
    model: GPTModel


@dataclass(frozen=True)
class RoleBuilder:
    """Builds the models of one experiment on one mesh. Every method is a collective over all ranks."""

    config: ExperimentConfig
    mesh: Mesh

    def spec(self) -> ModelSpec:
        return read_model(Path(self.config.model.path))

    def actor(self, total_steps: int) -> TrainedRole:
        return self._trained(self.config.model.path, "lm", self.config.actor.optim, total_steps, self.config.model.lora)

    def critic(self, total_steps: int) -> TrainedRole:
        path = self.config.critic.path or self.config.model.path
        return self._trained(
            path, "value", self.config.critic.optim, total_steps, self.config.critic.lora, "critic.lora"
        )

    def reward_model(self, total_steps: int) -> TrainedRole:
        """A value head on the starting weights, trained with the actor's settings."""
        return self._trained(
            self.config.model.path, "value", self.config.actor.optim, total_steps, self.config.model.lora
        )

    def reference(self, actor: TrainedRole) -> ModelEngine:
        """`actor` without its adapters where it has some and started from the reference's weights; else a model."""
        if self.config.model.lora.is_used and self.config.ref.path is None:
            return BaseEngine(actor.model, self.mesh)
        model = self._model(self.config.ref.path or self.config.model.path, "lm")
        return ModelEngine(model.requires_grad_(False), self.mesh)

    def _trained(
        self, path: str, head: Head, optim: OptimConfig, total_steps: int, lora: LoraConfig, setting: str = "model.lora"
    ) -> TrainedRole:
        """`setting` is the section of `lora`, for messages."""
        model = self._model(path, head, lora, setting)
        return TrainedRole(TrainingEngine(self.mesh, Optimizer(model, optim, total_steps)), model)

    def _model(self, path: str, head: Head, lora: LoraConfig | None = None, setting: str = "model.lora") -> GPTModel:
        spec = read_model(Path(path))
        has_lora = lora is not None and lora.is_used
        model = build_model(
            spec, self.mesh, dtype=DTYPES[self.config.model.dtype],
            layers="torch" if has_lora else self.config.model.layers, head=head, experts=self.config.model.experts,
        )  # fmt: skip
        import_hf(model, spec, self.mesh)
        if lora is not None and has_lora:
            attach_lora(model, spec, self.mesh, lora, head, self.config.trainer.seed, setting)
        return model
