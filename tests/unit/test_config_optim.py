"""Rules of the optimizer's communication and precision: each message, and that what is allowed passes."""
# ruff: noqa: E501  a line of a table is one case, with the whole message

from pathlib import Path

import pytest

from megappo.config.checks import check_experiment
from megappo.config.load import load_experiment
from megappo.config.problem import Severity
from megappo.errors import ConfigError
from tests.support.experiments import write_experiment

REDUCE, GATHER = "actor.optim.overlap_grad_reduce=true", "actor.optim.overlap_param_gather=true"
AWARE = "actor.optim.use_precision_aware_optimizer=true"
BF16 = "model.dtype=bfloat16"


def found(folder: Path, overrides: str) -> list[str]:
    config = load_experiment(write_experiment(folder), ["model.dtype=float32", *overrides.split()])
    return [problem.text() for problem in check_experiment(config)]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (f"{REDUCE} {GATHER} actor.optim.use_distributed_optimizer=false", "actor.optim.overlap_param_gather: true: every rank steps all parameters, for actor.optim.use_distributed_optimizer is false; set that to true, or this to false"),
        (GATHER, "actor.optim.overlap_param_gather: true: parameters are gathered in the buckets of gradients, and actor.optim.overlap_grad_reduce is false; set that to true too"),
        ("critic.optim.overlap_param_gather=true", "critic.optim.overlap_param_gather: true: parameters are gathered in the buckets of gradients, and critic.optim.overlap_grad_reduce is false; set that to true too"),
        (f"{REDUCE} actor.optim.align_param_gather=true", "actor.optim.align_param_gather: true: says when parameters begin to be gathered, and overlap_param_gather is false; set that to true, or this to false"),
        (f"{REDUCE} {GATHER} actor.optim.align_param_gather=true", "actor.optim.align_param_gather: true: Megatron aligns the chunks of virtual stages alone, and layout.vpp is 1; set it to false, or layout.vpp to 2"),
        ("actor.optim.bucket_size=1000", "actor.optim.bucket_size: 1000: does nothing, for without overlap_grad_reduce all gradients are one bucket; set that to true, or leave this out"),
        (f"{REDUCE} actor.fsdp.enable=true", "actor.optim.overlap_grad_reduce: true: is for whole parameters, and those of actor.fsdp.enable are cut; leave it out, or set actor.fsdp.enable to false"),
        ("actor.optim.grad_reduce_in_fp32=false actor.fsdp.enable=true", "actor.optim.grad_reduce_in_fp32: false: is for whole parameters, and those of actor.fsdp.enable are cut; leave it out, or set actor.fsdp.enable to false"),
        ("actor.optim.bucket_size=1000 actor.fsdp.enable=true", "actor.optim.bucket_size: 1000: does nothing, for the parameters of actor.fsdp.enable are cut; leave it out"),
        ("actor.optim.align_param_gather=true actor.fsdp.enable=true", "actor.optim.align_param_gather: true: does nothing, for the parameters of actor.fsdp.enable are cut; leave it out"),
        ("critic.optim.use_distributed_optimizer=false critic.fsdp.enable=true", "critic.optim.use_distributed_optimizer: false: does nothing, for the parameters of critic.fsdp.enable are cut; leave it out"),
        ("actor.optim.exp_avg_dtype=bfloat16", "actor.optim.exp_avg_dtype: bfloat16: without use_precision_aware_optimizer it is float32; set that to true, or leave this out"),
        (f"{AWARE} {BF16} actor.optim.use_distributed_optimizer=false", "actor.optim.use_precision_aware_optimizer: true: Megatron has it in its distributed optimizer, and actor.optim.use_distributed_optimizer is false; set that to true, or this to false"),
        (AWARE, "actor.optim.use_precision_aware_optimizer: true: the optimizer's own types stand beside bfloat16 parameters, and model.dtype is float32; set model.dtype to bfloat16, or this to false"),
        (f"{AWARE} {BF16} actor.optim.main_grads_dtype=bfloat16", "actor.optim.main_grads_dtype: bfloat16: it is the type of reduced gradients, and grad_reduce_in_fp32 is true; set that to false for bfloat16 gradients, or to true for float32 ones"),
        (f"{AWARE} {BF16} actor.optim.grad_reduce_in_fp32=false", "actor.optim.main_grads_dtype: float32: it is the type of reduced gradients, and grad_reduce_in_fp32 is false; set that to false for bfloat16 gradients, or to true for float32 ones"),
        ("actor.optim.min_lr_ratio=0.1", "actor.optim.min_lr_ratio: 0.1: does nothing, for actor.optim.lr_scheduler_type is constant; set that to cosine or linear, or leave it out"),
        ("critic.optim.lr_decay_steps=50 critic.optim.lr_warmup_steps=60", "critic.optim.lr_decay_steps: 50: does nothing, for critic.optim.lr_scheduler_type is constant; set that to cosine or linear, or leave it out"),
    ],
)  # fmt: skip
def test_each_rule(tmp_path: Path, overrides: str, expected: str) -> None:
    assert found(tmp_path, overrides) == [expected]


@pytest.mark.parametrize(
    "overrides",
    [
        f"{REDUCE} actor.optim.use_distributed_optimizer=false actor.optim.bucket_size=1000",
        f"{REDUCE} {GATHER} layout.pp=2 actor.offload.params=true actor.offload.grads=true model.lora.rank=4",
        f"{REDUCE} {GATHER} actor.optim.align_param_gather=true layout.pp=3 layout.vpp=2 actor.ppo_micro_batch_size_per_gpu=1",
        "actor.optim.grad_reduce_in_fp32=false",
        f"{AWARE} {BF16} {REDUCE} {GATHER} actor.optim.exp_avg_dtype=bfloat16 actor.optim.exp_avg_sq_dtype=float16 actor.optim.main_params_dtype=float16",
        f"{AWARE} {BF16} actor.optim.main_grads_dtype=bfloat16 actor.optim.grad_reduce_in_fp32=false",
    ],
)
def test_what_is_allowed(tmp_path: Path, overrides: str) -> None:
    assert found(tmp_path, overrides) == []


def test_what_does_nothing_for_cut_parameters_is_a_warning(tmp_path: Path) -> None:
    overrides = ["actor.optim.bucket_size=1000", "actor.optim.align_param_gather=true", "actor.fsdp.enable=true"]
    problems = check_experiment(load_experiment(write_experiment(tmp_path), overrides))
    assert [problem.severity for problem in problems] == [Severity.WARNING] * 2


@pytest.mark.parametrize("overrides", ["actor.optim.main_params_dtype=bfloat16", "actor.optim.exp_avg_dtype=float8"])
def test_types_that_no_kernel_has(tmp_path: Path, overrides: str) -> None:
    with pytest.raises(ConfigError, match=r"float32.*float16"):
        load_experiment(write_experiment(tmp_path), [overrides])
