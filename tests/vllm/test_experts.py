"""The trainer takes over the experts that vLLM chose: where experts nearly tie, log-probs of both agree."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.near_ties import with_near_ties
from tests.support.ranks import run_ranks
from tests.support.runs import write_run_experiment
from tests.support.tiny_models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.vllm

LIMIT = 2e-5
NO_EXPERT = -1
REPLAY = "actor.router_replay=rollout"
SETTINGS = [
    "rollout.engine=vllm", "rollout.n=4", "rollout.max_num_seqs=8", "rollout.max_num_batched_tokens=64",
    "data.max_prompt_length=96", "data.max_response_length=40", "rollout.ignore_eos=true", "hybrid.check_limit=9",
    "hybrid.check_every=1", "algorithm.adv_estimator=grpo", "actor.use_kl_loss=false",
    "algorithm.use_kl_in_reward=false", "actor.optim.lr=1e-4", "data.train_batch_size=4", "actor.ppo_mini_batch_size=4",
]  # fmt: skip
LATENT = {
    "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16, "q_lora_rank": 24, "kv_lora_rank": 32,
    "moe_intermediate_size": 64, "num_layers": 4,
}  # fmt: skip
TP2 = ["layout.tp=2", "layout.sequence_parallel=true"]
TURNS = [
    "rollout.multi_turn.enable=true", "rollout.multi_turn.environment=tests.support.environments:Echo",
    "rollout.multi_turn.max_turns=4", "rollout.multi_turn.max_tokens_per_turn=9", "rollout.ignore_eos=false",
]  # fmt: skip


def runs(folder: Path) -> dict[int, dict[str, Any]]:
    """By the number of ranks."""
    experts, latent = f"model.path={folder / 'experts'}", f"model.path={folder / 'latent'}"

    def entry(model: str, *overrides: str, blocks: int | None = None) -> dict[str, Any]:
        return {"overrides": [*SETTINGS, model, *overrides], "blocks": blocks}

    return {
        1: {
            "off": entry(experts),
            "one": entry(experts, REPLAY),
            "without cache": entry(experts, REPLAY, "rollout.enable_prefix_caching=false"),
            "preempted": entry(experts, REPLAY, "rollout.enable_prefix_caching=false", blocks=18),
            "preempted with cache": entry(experts, REPLAY, blocks=18),
            "turns": entry(experts, REPLAY, *TURNS),
            "latent off": entry(latent),
            "latent": entry(latent, REPLAY),
        },
        2: {
            "tp2": entry(experts, REPLAY, *TP2),
            "tp2 direct": entry(experts, REPLAY, *TP2, "hybrid.weights=direct"),
            "ep2 to tp2": entry(experts, REPLAY, "layout.ep=2", "rollout.tensor_model_parallel_size=2"),
            "ep2 to two replicas": entry(experts, REPLAY, "layout.ep=2"),
            "latent ep2 to tp2": entry(latent, REPLAY, "layout.ep=2", "rollout.tensor_model_parallel_size=2"),
        },
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("experts")
    experiment = write_run_experiment(folder)
    start = "in the middle of the night the old clock of the tower struck "  # two blocks, nearly
    rows = [{"prompt": f"{start}{number} times " * 1 + "x" * (number % 5), "answer": "1"} for number in range(14)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes: dict[str, Any] = {"hidden_size": 128, "head_dim": 32}
    with_near_ties(tiny_tokenizer(tiny_model(
        folder / "experts", "qwen3_moe", num_layers=4, num_experts=8, moe_intermediate_size=64, mlp_only_layers=[1],
        norm_topk_prob=True, **sizes,
    )))  # fmt: skip
    with_near_ties(tiny_tokenizer(tiny_model(folder / "latent", "deepseek_v3", seed=3, **LATENT, **sizes)))
    found = {}
    for num_ranks, named in runs(folder).items():
        (folder / "runs.json").write_text(json.dumps(named))
        arguments = ("--config", experiment, "--folder", folder, "--runs", folder / "runs.json")
        program = "tests.vllm.programs.experts"
        found |= run_ranks(program, *arguments, nproc=num_ranks, torchrun=True, timeout=600)
    return found


def differences(row: dict[str, Any]) -> list[float]:
    """|rollout − trainer| of the policy's tokens of a response."""
    return [
        abs(rollout - old) for rollout, old, own in zip(row["rollout"], row["old"], row["mask"], strict=True) if own
    ]


def largest(ranks: list[dict[str, Any]]) -> float:
    return max(max(differences(row)) for rank in ranks for row in rank["rows"])
