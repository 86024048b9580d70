"""Rules of parameters that data-parallel ranks share: each message, and that what is allowed passes."""
# ruff: noqa: E501  a line of a table is one case, with the whole message

from pathlib import Path

import pytest

from megappo.config.checks import check_experiment
from megappo.config.load import load_experiment
from megappo.errors import ConfigError
from tests.support.experiments import write_experiment

ACTOR, CRITIC, REF = (f"{role}.fsdp.enable=true" for role in ("actor", "critic", "ref"))


def found(folder: Path, overrides: str, **model: object) -> list[str]:
    config = load_experiment(write_experiment(folder, **model), overrides.split())
    return [problem.text().replace(str(folder), "F") for problem in check_experiment(config)]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (f"{ACTOR} layout.pp=2", "actor.fsdp.enable: true: parameters are cut on one pipeline stage alone, and layout.pp is 2; set layout.pp to 1 (layout.tp cuts layers too), or set it to false, and actor.optim.use_distributed_optimizer to true"),
        (f"{ACTOR} layout.cp=2", "actor.fsdp.enable: true: parameters are cut over data-parallel ranks alone, and layout.cp is 2; set layout.cp to 1, or set it to false, and actor.optim.use_distributed_optimizer to true"),
        (f"{REF} layout.pp=2 actor.use_kl_loss=true", "ref.fsdp.enable: true: parameters are cut on one pipeline stage alone, and layout.pp is 2; set layout.pp to 1 (layout.tp cuts layers too), or leave it out"),
        (f"{ACTOR} model.lora.rank=8", "actor.fsdp.enable: true: frozen weights with adapters are not cut, and model.lora.rank is 8; adapters need no gradients and moments of the rest: leave it out, or set the rank to 0"),
        (f"{CRITIC} critic.offload.grads=true", "critic.fsdp.enable: true: what is cut stays on the device, and critic.offload.grads is true; leave one of them out; without cutting, set it to false, and critic.optim.use_distributed_optimizer to true"),
        (f"{ACTOR} rollout.engine=vllm", "actor.fsdp.enable: true: vLLM would compute on the actor's own memory (hybrid.weights auto), which is given up when training has its turn; set hybrid.weights to load, or cut critic and reference alone"),
        (f"{CRITIC} algorithm.adv_estimator=grpo rollout.n=2", "critic.fsdp.enable: true: does nothing, for this run has no critic; leave it out"),
        (REF, "ref.fsdp.enable: true: does nothing, for this run has no reference; leave it out"),
        (f"{REF} actor.use_kl_loss=true model.lora.rank=8", "ref.fsdp.enable: true: does nothing, for the reference is the actor without its adapters; leave it out"),
        ("actor.fsdp.forward_prefetch=true", "actor.fsdp.forward_prefetch: true: does nothing, for actor.fsdp.enable is false; set that to true, or leave this out"),
    ],
)  # fmt: skip
def test_each_rule(tmp_path: Path, overrides: str, expected: str) -> None:
    assert found(tmp_path, overrides) == [expected]


def test_experts_are_refused(tmp_path: Path) -> None:
    experts = {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 16}
    problems = found(tmp_path, ACTOR, **experts)
    assert [problem for problem in problems if problem.startswith("actor.fsdp")] == [
        "actor.fsdp.enable: true: models with experts are not cut, and F/model has 8 of them a layer; leave it out; "
        "layout.ep shares the experts over data-parallel ranks"
    ]


@pytest.mark.parametrize(
    ("key", "value"), [("strategy", "fsdp2"), ("fsdp_config.reshard_after_forward", "true"), ("fsdp_config", "{}")]
)
def test_names_of_verl_lead_to_the_setting(tmp_path: Path, key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=r"actor\.(strategy|fsdp_config).*: Megatron trains.*set actor\.fsdp\.enable"):
        load_experiment(write_experiment(tmp_path), [f"actor.{key}={value}"])


@pytest.mark.parametrize(
    "overrides",
    [
        f"{ACTOR} {CRITIC} {REF} actor.use_kl_loss=true layout.tp=3 layout.sequence_parallel=true",
        # 5 divides nothing of the model.
        f"{ACTOR} {CRITIC} layout.dp=5 data.train_batch_size=10 actor.ppo_mini_batch_size=5 critic.ppo_mini_batch_size=10",
        f"{CRITIC} rollout.engine=vllm",
        f"{ACTOR} rollout.engine=vllm hybrid.weights=load",
        f"{CRITIC} model.lora.rank=8",
        f"{REF} actor.use_kl_loss=true model.lora.rank=8 ref.path={{folder}}/model",
        f"{REF} trainer.kind=dpo model.lora.rank=8 ref.path={{folder}}/model",
        f"{ACTOR} actor.fsdp.reduce_each_micro_batch=false critic.offload.params=true",
    ],
)
def test_what_is_allowed(tmp_path: Path, overrides: str) -> None:
    assert found(tmp_path, overrides.format(folder=tmp_path)) == []
