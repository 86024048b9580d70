"""Builds the models of a run: spec and weights from Hugging Face folders, engines around them.

Nothing else builds one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from megappo.config.actor import ActorConfig, CriticConfig
from megappo.config.experiment import ExperimentConfig
from megappo.config.lora import LoraConfig
from megappo.config.recompute import NO_RECOMPUTE, Recompute
from megappo.engines.offload import Kind, Memory, RoleMemory
from megappo.engines.optimizer import Optimizer
from megappo.engines.optimizer_states import check_available
from megappo.engines.routing import RouterCoefficients, limit_experts
from megappo.engines.sharded import ShardedMemory, ShardedModel
from megappo.engines.training import BaseEngine, ModelEngine, TrainingEngine
from megappo.errors import DataError
from megappo.models.attach_lora import attach_lora
from megappo.models.build import ModelSpec, build_model, read_model
from megappo.models.chunks import StageModel
from megappo.models.families.decoder import SCORE
from megappo.models.import_adapter import import_adapter
from megappo.models.import_hf import import_hf, is_classifier
from megappo.models.router import Capacity
from megappo.models.sharded import Shards
from megappo.models.weight_map import Head
from megappo.parallel.mesh import Mesh
from megappo.trainer.frozen_weights import FrozenWeights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class TrainedRole:
    """A trained model: its engine, the bare stage that checkpoints and exports read, and where the frozen weights under
    its adapters are, if it has some."""

    engine: TrainingEngine
    model: StageModel
    frozen: FrozenWeights | None = None


@dataclass(frozen=True)
class RoleBuilder:
    """Builds the models of one experiment on one mesh. Every method is a collective over all ranks."""

    config: ExperimentConfig
    mesh: Mesh
    _memories: list[RoleMemory] = field(default_factory=list)

    @property
    def memory(self) -> Memory:
        """Of all roles that were built."""
        return Memory(tuple(self._memories), gives_back=self.config.rollout.engine == "vllm")

    def spec(self) -> ModelSpec:
        return read_model(Path(self.config.model.path))

    def reference_spec(self) -> ModelSpec:
        """Of the reference's own folder: its vocabulary may be larger than the actor's."""
        return read_model(Path(self.config.ref.path or self.config.model.path))

    def actor(self, total_steps: int) -> TrainedRole:
        return self._trained(self.config.model.path, "lm", self.config.actor, total_steps, self.config.model.lora)

    def critic(self, total_steps: int) -> TrainedRole:
        path = self.config.critic.path or self.config.model.path
        return self._trained(path, "value", self.config.critic, total_steps, self.config.critic.lora, "critic.lora")

    def reward_model(self, total_steps: int) -> TrainedRole:
        """A value head on the starting weights, trained with the actor's settings."""
        return self._trained(self.config.model.path, "value", self.config.actor, total_steps, self.config.model.lora)

    def reference(self, actor: TrainedRole) -> ModelEngine:
        """`actor` without its adapters where it has some and started from the reference's weights; else a model."""
        if self.config.reference_is_actor:
            return BaseEngine(actor.model, self.mesh, actor.engine.memory)
        model = self._model(self.config.ref.path or self.config.model.path, "lm").requires_grad_(False)
        if self.config.ref.fsdp.enable:
            shards = Shards(model, self.mesh, self.config.ref.fsdp)
            shared = ShardedMemory(shards, {})
            self._memories.append(shared)
            return ModelEngine(ShardedModel(shards), self.mesh, shared)
        offloaded: list[Kind] = ["params"] if self.config.ref.offload.params else []
        memory = RoleMemory({"params": model.parameters}, offloaded, self.mesh.device)
        self._memories.append(memory)
        return ModelEngine(model, self.mesh, memory)

    def _trained(
        self,
        path: str,
        head: Head,
        config: ActorConfig | CriticConfig,
        total_steps: int,
        lora: LoraConfig,
        setting: str = "model.lora",
    ) -> TrainedRole:
        """`setting` is the section of `lora`, for messages."""
        check_available(config.optim, "actor.optim" if isinstance(config, ActorConfig) else "critic.optim")
        model = self._model(path, head, self.config.model.recompute, lora, setting)
        if config.fsdp.enable:
            Shards(model, self.mesh, config.fsdp)  # cuts the model, which keeps them
        optimizer = Optimizer(model, config.optim, total_steps, config.offload)
        self._memories.append(optimizer.memory)
        moe = self.config.model.moe
        router = RouterCoefficients(moe.aux_loss_coeff, moe.z_loss_coeff, moe.bias_update_rate)
        frozen = FrozenWeights.of(Path(path)) if lora.is_used else None
        return TrainedRole(TrainingEngine(self.mesh, optimizer, router), model, frozen)

    def _model(
        self,
        path: str,
        head: Head,
        recompute: Recompute = NO_RECOMPUTE,
        lora: LoraConfig | None = None,
        setting: str = "model.lora",
    ) -> StageModel:
        spec = read_model(Path(path))
        if head == "lm" and is_classifier(path):
            raise DataError(
                f"{path}: a sequence classifier (it has {SCORE}), whose head a policy has no place for; give a "
                "language model. critic.path, a reward part of kind model and trainer.kind: reward_model take such ones"
            )
        has_lora = lora is not None and lora.is_used
        settings = self.config.model
        model = build_model(
            spec, self.mesh, dtype=DTYPES[settings.dtype], layers="torch" if has_lora else settings.layers, head=head,
            experts=settings.experts, dispatcher=settings.moe.dispatcher, recompute=recompute,
            cp_comm_type=settings.cp_comm_type, is_packed=settings.use_remove_padding,
        )  # fmt: skip
        import_hf(model, spec, self.mesh)
        if settings.moe.capacity_factor is not None:
            limit_experts(model, Capacity(settings.moe.capacity_factor, settings.moe.token_drop_policy))
        if lora is not None and has_lora:
            attach_lora(model, spec, self.mesh, lora, head, self.config.trainer.seed, setting)
            if lora.adapter_path is not None:
                import_adapter(model, spec, self.mesh, lora.adapter_path, head, setting)
        return model
