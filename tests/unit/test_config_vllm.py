"""Rules about vLLM's settings: each message, and that what is allowed passes."""

from pathlib import Path

import pytest

from megappo.config.checks import check_experiment
from megappo.config.load import load_experiment
from tests.support.experiments import write_experiment

VLLM = "rollout.engine=vllm"
EXPERTS = {
    "model_type": "qwen3_moe", "num_attention_heads": 12, "num_key_value_heads": 12, "num_experts": 6,
    "num_experts_per_tok": 2, "moe_intermediate_size": 8,
}  # fmt: skip


def found(folder: Path, *overrides: str) -> list[str]:
    config = load_experiment(write_experiment(folder, ""), overrides)
    return [f"{problem.severity.value} {problem.text()}" for problem in check_experiment(config)]


def test_vllm_and_its_settings_are_sound(tmp_path: Path) -> None:
    settings = ("rollout.enforce_eager=true", "rollout.quantization=fp8", "rollout.max_model_len=64")
    assert found(tmp_path, VLLM, *settings) == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            [VLLM, "rollout.max_num_batched_tokens=100"],
            "error rollout.max_num_batched_tokens: 100: a forward has a token of each of the max_num_seqs sequences; "
            "at least 256",
        ),
        (
            [
                VLLM,
                "rollout.max_num_batched_tokens=8",
                "rollout.max_num_seqs=8",
                "rollout.enable_chunked_prefill=false",
            ],
            "error rollout.max_num_batched_tokens: 8: without enable_chunked_prefill, a forward has to hold the "
            "longest prompt; at least 32",
        ),
        (
            [VLLM, "rollout.max_model_len=20"],
            "error rollout.max_model_len: 20: data.max_prompt_length 16 and data.max_response_length 16 make 32 "
            "tokens; at least 32, or null",
        ),
        (
            [VLLM, "rollout.temperature=0.005"],
            "error rollout.temperature: 0.005: vLLM would sample at 0.01 instead; at least 0.01",
        ),
        (
            [VLLM, "trainer.evaluation.temperature=0.001"],
            "error trainer.evaluation.temperature: 0.001: vLLM would sample at 0.01 instead",
        ),
        (
            [VLLM, "rollout.quantization=fp8", "model.dtype=float32"],
            'error rollout.quantization: "fp8": vLLM can\'t with model.dtype float32; set model.dtype to bfloat16',
        ),
        (
            ["rollout.quantization=fp8"],
            'warning rollout.quantization: "fp8": does nothing, for rollout.engine is native; leave it out',
        ),
        (
            ["rollout.free_cache_engine=false"],
            "warning rollout.free_cache_engine: false: does nothing, for rollout.engine is native",
        ),
        (
            ["hybrid.bucket_mib=64"],
            "warning hybrid.bucket_mib: 64: does nothing, for the native engine decodes on the training shards where "
            "they lie; leave it out",
        ),
        (
            [VLLM, "hybrid.weights=load", "hybrid.bucket_mib=64"],
            "warning hybrid.bucket_mib: 64: does nothing, for weights are streamed through vLLM's loader",
        ),
        (
            [VLLM, "rollout.enable_expert_parallel=true"],
            "/model has no experts; leave it out",
        ),
    ],
)
def test_messages(tmp_path: Path, overrides: list[str], expected: str) -> None:
    problems = found(tmp_path, *overrides)
    assert len(problems) == 1 and expected in problems[0]


def test_chunked_prefill_takes_prompts_longer_than_a_forward(tmp_path: Path) -> None:
    assert found(tmp_path, VLLM, "rollout.max_num_batched_tokens=8", "rollout.max_num_seqs=8") == []


def test_what_a_switch_reads_is_not_told_to_do_nothing(tmp_path: Path) -> None:
    assert found(tmp_path, VLLM, "hybrid.bucket_mib=64", "hybrid.check_every=0", "hybrid.check_limit=0.5") == []
    assert found(tmp_path, "rollout.tensor_model_parallel_size=1", "layout.tp=3", "hybrid.bucket_mib=64") == []


def test_checks_of_switches_are_those_of_ppo(tmp_path: Path) -> None:
    lines = found(tmp_path, "trainer.kind=sft", "hybrid.check_every=3", "hybrid.check_limit=0.5")
    assert [line for line in lines if "hybrid" in line] == [
        "warning hybrid.check_every: 3: does nothing, for trainer.kind sft checks no switch; leave it out",
        "warning hybrid.check_limit: 0.5: does nothing, for trainer.kind sft checks no switch; leave it out",
    ]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["rollout.tensor_model_parallel_size=2", "layout.ep=2"], None),
        (["rollout.tensor_model_parallel_size=4", "layout.tp=4", "rollout.enable_expert_parallel=false"], None),
        (["rollout.tensor_model_parallel_size=4", "layout.tp=4"], None),
        (
            ["layout.tp=4", "rollout.enable_expert_parallel=true"],
            "error rollout.enable_expert_parallel: true: 6 experts can't be spread evenly over the 4 ranks of a "
            "replica; false, or rollout.tensor_model_parallel_size of 1, 2, 3",
        ),
        (
            ["rollout.tensor_model_parallel_size=4", "layout.tp=4", "layout.ep=2"],
            "warning rollout.enable_expert_parallel: 6 experts can't be spread evenly over the 4 ranks of a replica, "
            "as they are on GPUs with layout.ep over 1; false, or rollout.tensor_model_parallel_size of 1, 2, 3",
        ),
    ],
)
def test_whole_experts_over_a_replica(tmp_path: Path, overrides: list[str], expected: str | None) -> None:
    config = load_experiment(write_experiment(tmp_path, "", **EXPERTS), [VLLM, *overrides])
    lines = [f"{each.severity.value} {each.text()}" for each in check_experiment(config)]
    assert [line for line in lines if "enable_expert_parallel" in line] == ([expected] if expected else [])
