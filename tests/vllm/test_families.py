"""Every family in vLLM, by its loader and directly: greedy log-probs against the trainer's, before and after an update.

What a switch does to layouts, sampling and requests is in `test_switch.py`, for some of the families.
"""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.tiny_models import VARIED_SETTINGS, FamilyName, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.vllm

EXPERTS = {"moe_intermediate_size": 64}
SETTINGS: dict[FamilyName, dict[str, Any]] = VARIED_SETTINGS | {
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 96, "decoder_sparse_step": 2},
    "mixtral": {},
    "deepseek_v2": EXPERTS | {"qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16, "q_lora_rank": 24},
}
CASES: Mapping[str, tuple[FamilyName, ...]] = {
    # On a CPU, what `auto` takes.
    "auto": ("mistral", "phi3", "glm4", "gemma3_text", "qwen2_moe", "mixtral"),
    "direct": ("mistral", "glm4", "gemma2", "gemma3_text", "qwen2_moe", "deepseek_v2"),
}
NAMED = [(weights, family) for weights, families in CASES.items() for family in families]


def with_published_keys(folder: Path) -> None:
    """Gives the folder the keys of Gemma 3 as published, in place of those that transformers 5 saves."""
    config = json.loads((folder / "config.json").read_text())
    ropes = config.pop("rope_parameters")
    config["rope_theta"] = ropes["full_attention"]["rope_theta"]
    config["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]
    assert config.pop("layer_types") == ["sliding_attention", "full_attention"]
    config["sliding_window_pattern"] = 2
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """By way and family. Each way is one process, which starts one engine after the other."""
    root = tmp_path_factory.mktemp("families")
    for weights, family in NAMED:
        # Heads of 32, the smallest that vLLM attends to on a CPU; a vocabulary that has padding.
        settings = {"vocab_size": 100, "hidden_size": 128, "head_dim": 32} | SETTINGS[family]
        folder = tiny_model(root / weights / family, family, **settings)
        tiny_tokenizer(folder, vocab_size=100)
        if (weights, family) == ("direct", "gemma3_text"):
            with_published_keys(folder)

    def run(weights: str) -> dict[tuple[str, str], dict[str, Any]]:
        folders = [root / weights / family for family in CASES[weights]]
        made = run_ranks(
            "tests.vllm.programs.families", "--weights", weights, "--models", *folders, nproc=1, timeout=500,
            torchrun=True,
        )  # fmt: skip
        return {(weights, family): result for family, result in zip(CASES[weights], made, strict=True)}

    with ThreadPoolExecutor(2) as pool:
        loaded, direct = pool.map(run, CASES)
    return loaded | direct


@pytest.mark.parametrize(("weights", "family"), NAMED)
def test_log_probs_are_those_of_the_trainer(
    weights: str, family: FamilyName, results: dict[tuple[str, str], dict[str, Any]]
) -> None:
    result = results[weights, family]
    assert result["imported"] < 1e-4 and result["update"] < 1e-4
    assert result["stale"] > 1e-2, "the update changes the log-probs, or the test shows nothing"


@pytest.mark.parametrize("family", CASES["direct"])
def test_only_what_vllm_fuses_in_another_order_is_copied(
    family: FamilyName, results: dict[tuple[str, str], dict[str, Any]]
) -> None:
    result = results["direct", family]
    # By hand, q, k and v of both layers: 4 + 2 + 2 heads of 32 rows, with a number more each where there are biases.
    # DeepSeek's two down projections are apart in vLLM too, as it runs on a CPU.
    fused = 2 * (4 + 2 + 2) * 32 * (128 + (family in ("glm4", "qwen2_moe"))) * 4
    assert result["copied"] == (0 if family == "deepseek_v2" else fused)
    assert result["aliased"] == result["weight bytes"] - result["copied"]


@pytest.mark.parametrize(("weights", "family"), NAMED)
def test_tensors_are_those_of_the_trainer_as_far_as_they_can_be_read(
    weights: str, family: FamilyName, results: dict[tuple[str, str], dict[str, Any]]
) -> None:
    said = results[weights, family]["worst tensor"]
    if weights == "auto" and family in ("qwen2_moe", "mixtral"):
        assert said.startswith("none of those that can be read back, and ")
    else:
        assert said == "None"


def test_auto_says_which_way_it_takes(results: dict[tuple[str, str], dict[str, Any]]) -> None:
    said = {way: {result["said"] for (each, _), result in results.items() if each == way} for way in CASES}
    assert said["auto"] == {"weights go to vLLM through its own loader, tensor by tensor"}
    (direct,) = said["direct"]
    assert direct.startswith("weights go to vLLM directly: its parameters are training's memory")
