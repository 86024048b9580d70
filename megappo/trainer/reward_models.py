"""The reward models of a `reward` section, built on the ranks of the training layout."""

from __future__ import annotations

from megappo.config.experiment import ExperimentConfig
from megappo.config.reward import RewardConfig, RewardPartConfig
from megappo.data.conversation import ConversationEncoder
from megappo.data.tokenizer import load_tokenizer
from megappo.engines.training import ModelEngine
from megappo.errors import DataError
from megappo.models.families.decoder import SCORE
from megappo.models.hf_folder import SafetensorsReader
from megappo.parallel.mesh import Mesh
from megappo.trainer.policy_source import PolicySource
from megappo.trainer.roles import DTYPES
from megappo.workers.reward import RewardWorker
from megappo.workers.reward_model import RewardModel


def build_reward_worker(config: ExperimentConfig, section: RewardConfig, mesh: Mesh) -> RewardWorker:
    """The worker of one `reward` section, with its reward models in the type and layers of section `model`."""
    models = {
        part.name: _reward_model(config, part, f"reward.parts.{index}", mesh)
        for index, part in enumerate(section.parts)
        if part.kind == "model"
    }
    return RewardWorker(section, mesh, models)


def _reward_model(config: ExperimentConfig, part: RewardPartConfig, where: str, mesh: Mesh) -> RewardModel:
    """Raises DataError where the folder or checkpoint holds no reward model."""
    assert part.path is not None, "checked by require_sound"
    source = PolicySource.of(part.path)
    if source.checkpoint is None:
        with SafetensorsReader(source.folder) as reader:
            if SCORE not in reader.names:
                raise DataError(
                    f"{where}.path: {part.path} has no tensor {SCORE}: it is no sequence classifier; give a folder "
                    "that transformers' …ForSequenceClassification has saved, or the checkpoint of a reward model"
                )
    elif source.head != "value":
        raise DataError(
            f"{where}.path: {part.path} is a policy's checkpoint; give one of a run with trainer.kind: reward_model"
        )
    tokenizer = load_tokenizer(part.tokenizer_path or source.folder)
    encoder = ConversationEncoder(tokenizer, part.apply_chat_template, f"{where}.apply_chat_template")
    settings = config.model
    model, spec = source.load_any(
        mesh, DTYPES[settings.dtype], head="value", layers=settings.layers, experts=settings.experts
    )
    return RewardModel(
        part=part.name,
        engine=ModelEngine(model, mesh),
        encoder=encoder,
        pad_id=spec.hf_config.get("pad_token_id"),
        vocab_size=spec.shape.vocab_size,
        max_positions=spec.shape.max_positions,
        micro_batch_size=part.micro_batch_size_per_gpu,
    )
