"""Rules about vLLM's settings: each message, and that what is allowed passes."""

from pathlib import Path

import pytest

from megappo.config.checks import check_experiment
from megappo.config.load import load_experiment
from tests.support.experiments import write_experiment

VLLM = "rollout.engine=vllm"


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
    ],
)
def test_messages(tmp_path: Path, overrides: list[str], expected: str) -> None:
    problems = found(tmp_path, *overrides)
    assert len(problems) == 1 and expected in problems[0]


def test_chunked_prefill_takes_prompts_longer_than_a_forward(tmp_path: Path) -> None:
    assert found(tmp_path, VLLM, "rollout.max_num_batched_tokens=8", "rollout.max_num_seqs=8") == []
