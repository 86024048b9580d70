"""The models of a `reward` section, built on the ranks of the training layout; a section without any builds none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megappo.config.experiment import ExperimentConfig
from megappo.config.reward import RewardConfig, RewardPartConfig
from megappo.data.conversation import ConversationEncoder
from megappo.data.tokenizer import load_tokenizer
from megappo.engines.training import ModelEngine
from megappo.errors import DataError
from megappo.models.build import read_model
from megappo.models.families.decoder import SCORE
from megappo.parallel.mesh import Mesh
from megappo.trainer.policy_source import PolicySource
from megappo.trainer.roles import DTYPES
from megappo.workers.cutting import Cutter
from megappo.workers.implicit_reward import ImplicitReward
from megappo.workers.policy import LogProbs
from megappo.workers.reward import RewardWorker, ScoringModel
from megappo.workers.reward_model import RewardModel


def build_reward_worker(config: ExperimentConfig, section: RewardConfig, mesh: Mesh) -> RewardWorker:
    """The worker of one `reward` section, with its models in the type and layers of section `model`."""
    builders: dict[str, Callable[[ExperimentConfig, RewardPartConfig, str, Mesh], ScoringModel]] = {
        "model": _reward_model,
        "implicit": _implicit_reward,
    }
    models = {
        part.name: builders[part.kind](config, part, f"reward.parts.{index}", mesh)
        for index, part in enumerate(section.parts)
        if part.kind in builders
    }
    return RewardWorker(section, mesh, models)


def _reward_model(config: ExperimentConfig, part: RewardPartConfig, where: str, mesh: Mesh) -> RewardModel:
    """Raises DataError where the folder or checkpoint holds no reward model."""
    assert part.path is not None, "checked by require_sound"
    source = PolicySource.of(part.path)
    if source.head != "value":
        if source.checkpoint is None:
            raise DataError(
                f"{where}.path: {part.path} has no tensor {SCORE}: it is no sequence classifier; give a folder "
                "that transformers' …ForSequenceClassification has saved, or the checkpoint of a reward model"
            )
        raise DataError(
            f"{where}.path: {part.path} is a policy's checkpoint; give one of a run with trainer.kind: reward_model"
        )
    tokenizer = load_tokenizer(part.tokenizer_path or source.folder)
    encoder = ConversationEncoder(tokenizer, part.apply_chat_template, f"{where}.apply_chat_template")
    settings = config.model
    model, spec = source.load_any(
        mesh, DTYPES[settings.dtype], head="value", layers=settings.layers, experts=settings.experts,
        cp_comm_type=settings.cp_comm_type, is_packed=settings.use_remove_padding,
    )  # fmt: skip
    return RewardModel(
        part=part.name,
        engine=ModelEngine(model, mesh),
        encoder=encoder,
        pad_id=spec.hf_config.get("pad_token_id"),
        vocab_size=spec.shape.vocab_size,
        max_positions=spec.shape.max_positions,
        cut=Cutter(mesh, part.micro_batch_size_per_gpu, config.model.use_remove_padding),
    )


def _implicit_reward(config: ExperimentConfig, part: RewardPartConfig, where: str, mesh: Mesh) -> ImplicitReward:
    """Raises DataError where the two policies are none, or have not the actor's tokens."""
    assert part.policy is not None, "checked by require_sound"
    vocab_size = read_model(Path(config.model.path)).shape.vocab_size

    def engine(setting: str, path: str) -> ModelEngine:
        """A policy that is only run forward; `setting` is the key that names it, for messages."""
        source = PolicySource.of(path)
        if source.head != "lm":
            raise DataError(f"{where}.{setting}: {path} is a reward model; give a policy")
        model, spec = source.load_any(
            mesh, DTYPES[config.model.dtype], head="lm", layers=config.model.layers, experts=config.model.experts,
            cp_comm_type=config.model.cp_comm_type, is_packed=config.model.use_remove_padding,
        )  # fmt: skip
        if spec.shape.vocab_size != vocab_size:
            raise DataError(
                f"{where}.{setting}: {path} has a vocabulary of {spec.shape.vocab_size} tokens, and "
                f"{config.model.path} one of {vocab_size}; the rewards are of the actor's own tokens, so give a policy "
                "of the same model"
            )
        return ModelEngine(model, mesh)

    return ImplicitReward(
        part=part.name,
        policy=engine("policy", part.policy),
        reference=engine("reference", part.reference or config.model.path),
        log_probs=LogProbs(
            mesh=mesh, vocab_size=vocab_size, temperature=1.0, chunk_tokens=config.actor.entropy_chunk_tokens
        ),
        beta=part.beta,
        at_end=part.at_end,
        cut=Cutter(mesh, part.micro_batch_size_per_gpu, config.model.use_remove_padding),
    )
