"""Adapters that PEFT has trained on fused experts: read, on every layout of experts, they compute PEFT's log-probs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.adapters import random_tokens
from tests.support.parity import write_experiment
from tests.support.ranks import run_ranks
from tests.support.tiny_models import FamilyName, tiny_model, tiny_tokenizer

peft = pytest.importorskip("peft")
# PEFT looks for them among modules alone (0.21).
pytestmark = pytest.mark.filterwarnings("ignore:.*_pattern keys did not match")
LIMIT = 1e-4
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
MIXTRAL_NAMES = "[q_proj,w1,w3,w2]"
# Name → family, parameters that PEFT adapts, our names of them.
ADAPTERS: dict[str, tuple[FamilyName, list[str], str]] = {
    "qwen": ("qwen3_moe", BOTH, "[q_proj,gate_proj,up_proj,down_proj]"),
    "mixtral": ("mixtral", BOTH, MIXTRAL_NAMES),
    "gate-up": ("qwen3_moe", BOTH[:1], "[q_proj,gate_proj,up_proj]"),
    "down": ("qwen3_moe", BOTH[1:], "[q_proj,down_proj]"),
}
TWICE = {r".*\.experts\.gate_up_proj": 6}
TP = "layout.tp=2,layout.sequence_parallel=true"


def saved_by_peft(folder: Path, name: str, **settings: Any) -> torch.Tensor:
    """Writes the folder `name` of random adapters; returns their log-probs [2, 20, vocabulary]."""
    import transformers

    family, parameters, _ = ADAPTERS[name.removesuffix("-mixed")]
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / family, dtype=torch.float32)
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj"], target_parameters=parameters, **settings)
    model = peft.get_peft_model(base, config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        plain = base(random_tokens()).logits.log_softmax(-1)
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.normal_(std=0.3, generator=generator)
        found = model(random_tokens()).logits.log_softmax(-1)
    assert float((found - plain).abs().max()) > 0.1
    model.save_pretrained(folder / name)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """PEFT's log-probs by adapter; ours, or a refusal, by run."""
    folder = tmp_path_factory.mktemp("fused")
    for family in ("qwen3_moe", "mixtral"):
        tiny_tokenizer(tiny_model(folder / family, family))
    theirs = {name: saved_by_peft(folder, name) for name in ADAPTERS}
    saved_by_peft(folder, "qwen-mixed", rank_pattern=TWICE, alpha_pattern=dict.fromkeys(TWICE, 12))

    def words(name: str, *more: str) -> str:
        family, _, targets = ADAPTERS[name.removesuffix("-mixed")]
        settings = f"model.path={folder}/{family},model.lora.rank=3,model.lora.alpha=6"
        settings += f",model.lora.target_modules={targets},model.lora.adapter_path={folder}/{name}"
        return ",".join([settings, "algorithm.adv_estimator=grpo", *more])

    one = {name: words(name) for name in [*ADAPTERS, "qwen-mixed"]}
    one["qwen-sequential"] = words("qwen", "model.experts=sequential")
    two = {
        "qwen-ep2": words("qwen", "layout.ep=2"),
        "qwen-tp2-etp2": words("qwen", TP, "layout.etp=2"),
        "mixtral-tp2-ep2": words("mixtral", TP, "layout.ep=2"),
    }
    config = write_experiment(folder, folder / "qwen3_moe", folder / "qwen3_moe")
    ours: dict[str, Any] = {}
    for nproc, named in ((1, one), (2, two)):
        runs = [f"{name}={overrides}" for name, overrides in named.items()]
        ours |= run_ranks(
            "tests.distributed.programs.adapter_log_probs", "--config", config, "--runs", *runs, nproc=nproc
        )
    return theirs, ours


RUNS = [*ADAPTERS, "qwen-sequential", "qwen-ep2", "qwen-tp2-etp2", "mixtral-tp2-ep2"]


@pytest.mark.parametrize("run", RUNS)
def test_they_compute_what_peft_computes(found: tuple[dict[str, torch.Tensor], dict[str, Any]], run: str) -> None:
    theirs, ours = found
    expected = theirs[run if run in theirs else run.partition("-")[0]]
    log_probs = torch.tensor(ours[run])[..., : expected.shape[-1]]
    assert float((log_probs - expected).abs().max()) <= LIMIT


def test_gate_and_up_that_training_at_twice_the_rank_has_mixed_are_refused(
    found: tuple[dict[str, torch.Tensor], dict[str, Any]],
) -> None:
    assert "mixes the adapters of gate and up" in (refusal := found[1]["qwen-mixed"])
    assert refusal.endswith("at rank 6 does; merge them with PEFT, and begin with the merged model")
