"""Rules of recompute and offload: each message, and that what is allowed passes."""
# ruff: noqa: E501  a line of a table is one case, with the whole message

from pathlib import Path

import pytest

from megappo.config.checks import check_experiment
from megappo.config.load import load_experiment
from megappo.config.recompute import Recompute
from megappo.errors import ConfigError
from megappo.models.families.base import ModelShape
from megappo.models.families.llama import Llama
from megappo.models.fits import check_recompute
from tests.support.experiments import write_experiment

FULL = "model.recompute_granularity=full"
SELECTIVE = "model.recompute_granularity=selective"
UNIFORM, BLOCK = f"{FULL} model.recompute_method=uniform", f"{FULL} model.recompute_method=block"


def found(folder: Path, overrides: str) -> list[str]:
    """What is said of a model of 6 layers."""
    config = load_experiment(write_experiment(folder), overrides.split())
    return [problem.text().replace(str(folder), "F") for problem in check_experiment(config)]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (f"{FULL} model.recompute_num_layers=1", "model.recompute_method: is missing, and model.recompute_granularity full needs it; uniform or block"),
        (UNIFORM, "model.recompute_num_layers: is missing, and model.recompute_granularity full needs it; for example 1"),
        (f"{UNIFORM} model.recompute_num_layers=4", "model.recompute_num_layers: 4: does not divide the 6 layers of a stage of F/model; nearest that can: 3 or 6"),
        (f"{UNIFORM} model.recompute_num_layers=2 layout.pp=2", "model.recompute_num_layers: 2: does not divide the 3 layers of a stage of F/model; nearest that can: 1 or 3"),
        (f"{BLOCK} model.recompute_num_layers=4 layout.pp=2", "model.recompute_num_layers: 4: is more than the 3 layers of a stage of F/model; nearest that can: 3"),
        ("model.recompute_method=block", 'model.recompute_method: "block": is for full recompute, and model.recompute_granularity is null; set that to full, or leave this out'),
        (f"{SELECTIVE} model.recompute_num_layers=2", "model.recompute_num_layers: 2: is for full recompute, and model.recompute_granularity is selective; set that to full, or leave this out"),
        ("model.recompute_modules=[mlp]", 'model.recompute_modules: ["mlp"]: is for selective recompute, and model.recompute_granularity is null; set that to selective, or leave this out'),
        (f"{SELECTIVE} model.recompute_modules=[]", "model.recompute_modules: []: names no module, and nothing would be recomputed; for example [core_attn]"),
        (f"{SELECTIVE} model.recompute_modules=[mlp,moe]", "model.recompute_modules.1: moe: is a part of layers with experts, and F/model is dense (llama); mlp is the part of its layers"),
        ("actor.offload.params=true rollout.engine=vllm", "actor.offload.params: true: vLLM computes on the actor's own memory (hybrid.weights auto), and its CUDA graphs keep addresses that parameters lose when they are moved; set hybrid.weights to load, or offload grads and optimizer alone"),
        ("critic.offload.grads=true algorithm.adv_estimator=grpo rollout.n=2", "critic.offload.grads: true: does nothing, for this run has no critic; leave it out"),
        ("ref.offload.params=true actor.use_kl_loss=true model.lora.rank=4", "ref.offload.params: true: does nothing, for the reference is the actor without its adapters; leave it out"),
        ("ref.offload.params=true trainer.kind=dpo model.lora.rank=4", "ref.offload.params: true: does nothing, for the reference is the actor without its adapters; leave it out"),
        ("ref.offload.params=true", "ref.offload.params: true: does nothing, for this run has no reference; leave it out"),
    ],
)  # fmt: skip
def test_each_rule(tmp_path: Path, overrides: str, expected: str) -> None:
    assert found(tmp_path, overrides) == [expected]


@pytest.mark.parametrize(
    "overrides",
    [
        SELECTIVE,
        f"{SELECTIVE} model.recompute_modules=[core_attn,layernorm,mlp]",
        f"{UNIFORM} model.recompute_num_layers=3 layout.pp=2",
        f"{BLOCK} model.recompute_num_layers=2 layout.pp=2",
        "actor.offload.grads=true actor.offload.optimizer=true rollout.engine=vllm",
        "actor.offload.params=true rollout.engine=vllm hybrid.weights=load",
        "critic.offload.params=true ref.offload.params=true actor.use_kl_loss=true",
        "ref.offload.params=true actor.use_kl_loss=true model.lora.rank=4 ref.path={folder}/model",
    ],
)
def test_what_is_allowed(tmp_path: Path, overrides: str) -> None:
    assert found(tmp_path, overrides.format(folder=tmp_path)) == []


def dense() -> ModelShape:
    return Llama().shape(
        {
            "hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1, "intermediate_size": 8,
            "vocab_size": 9, "max_position_embeddings": 8, "rms_norm_eps": 1e-6,
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("layernorm", "model.recompute_modules: layernorm, but Transformer Engine's layers make norm and linear layer"),
        ("moe", "model.recompute_modules: moe, but this model is dense"),
        ("shared_experts", "model.recompute_modules: shared_experts, but this model has none"),
    ],
)
def test_modules_that_a_model_has_not(module: str, message: str) -> None:
    modules: tuple[object, ...] = ("core_attn", module)
    with pytest.raises(ConfigError, match=message):
        check_recompute(dense(), Recompute("selective", modules=modules), has_fused_norms=True)  # type: ignore[arg-type]


def test_norms_can_be_recomputed_where_they_stand_alone() -> None:
    """The same modules are refused or not by the kind of layers alone."""
    recompute = Recompute("selective", modules=("layernorm", "mlp"))
    refused = []
    for has_fused_norms in (True, False):
        try:
            check_recompute(dense(), recompute, has_fused_norms=has_fused_norms)
        except ConfigError:
            refused.append(has_fused_norms)
    assert refused == [True]
