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

LIMIT = 1e-5
FEW_BLOCKS = 18
"""Of 32 tokens: too few for eight sequences of 3 or 4 blocks."""
REPLAYED = [
    "one", "preempted", "preempted with cache", "turns", "latent", "tp2", "ep2 to tp2", "ep2 to two replicas",
    "latent ep2 to tp2",
]  # fmt: skip
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
            "preempted": entry(experts, REPLAY, "rollout.enable_prefix_caching=false", blocks=FEW_BLOCKS),
            "preempted with cache": entry(experts, REPLAY, blocks=FEW_BLOCKS),
            "turns": entry(experts, REPLAY, *TURNS),
            "latent": entry(latent, REPLAY),
        },
        2: {
            "tp2": entry(experts, REPLAY, *TP2, "hybrid.weights=direct"),
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
    rows = [{"prompt": start + f"{number} times" + "x" * (number % 5), "answer": "1"} for number in range(14)]
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


def differences(ranks: list[dict[str, Any]]) -> list[float]:
    """|rollout − trainer| of all tokens of the policy."""
    return [
        abs(rollout - old)
        for rank in ranks
        for row in rank["rows"]
        for rollout, old, own in zip(row["rollout"], row["old"], row["mask"], strict=True)
        if own
    ]


def test_without_replay_the_choices_differ(results: dict[str, list[dict[str, Any]]]) -> None:
    found = differences(results["off"])
    assert sum(found) / len(found) > 0.05
    assert all(row["experts"] is None for row in results["off"][0]["rows"])


@pytest.mark.parametrize("name", REPLAYED)
def test_with_replay_log_probs_agree(name: str, results: dict[str, list[dict[str, Any]]]) -> None:
    """After an update, so that nothing of older weights is found in the cache."""
    found = differences(results[name])
    print(f"{name}: largest {max(found):.3g}, mean {sum(found) / len(found):.3g}")
    assert max(found) < LIMIT
    for rank in results[name]:
        assert rank["rollout"]["rollout/router_changed"] > 0.1  # left alone, the trainer would choose others
        assert rank["update"]["actor/router_changed"] > 0.1


@pytest.mark.parametrize("name", REPLAYED)
def test_every_token_but_the_last_has_experts(name: str, results: dict[str, list[dict[str, Any]]]) -> None:
    """Two different ones of eight, in each of the three layers that have them."""
    for rank in results[name]:
        for row in rank["rows"]:
            *computed, last = row["experts"]
            assert len(computed) == len(row["prompt_ids"]) + len(row["response_ids"]) - 1
            assert all(len({*layer} & {*range(8)}) == 2 for token in computed for layer in token)
            assert {len(token) for token in computed} == {3} and last == [[-1, -1]] * 3


@pytest.mark.parametrize("name", ["tp2", "ep2 to tp2", "ep2 to two replicas", "latent ep2 to tp2"])
def test_ranks_that_train_on_a_sequence_have_the_same_experts(
    name: str, results: dict[str, list[dict[str, Any]]]
) -> None:
    rows: dict[int, Any] = {}
    for rank in results[name]:
        for row in rank["rows"]:
            assert rows.setdefault(row["position"], row["experts"]) == row["experts"]
    assert len(rows) == 16 and sum(len(rank["rows"]) for rank in results[name]) == (32 if name == "tp2" else 16)


def test_prompts_are_found_in_the_cache_and_prefilled_in_parts(results: dict[str, list[dict[str, Any]]]) -> None:
    """Sequences of a prompt share its first two blocks, of 69 to 75 tokens; others of the same start share one."""
    for name in ("one", "latent", "tp2", "ep2 to two replicas"):
        assert all(rank["cached"] >= 32 * 4 for rank in results[name])
        assert all(rank["largest step"] == 64 for rank in results[name])
    assert results["preempted"][0]["cached"] == 0


@pytest.mark.parametrize("name", ["preempted", "preempted with cache"])
def test_requests_were_preempted_after_tokens_were_drawn(name: str, results: dict[str, list[dict[str, Any]]]) -> None:
    (rank,) = results[name]
    sequences = [(row["prompt_ids"] + row["response_ids"], len(row["prompt_ids"])) for row in rank["rows"]]
    interrupted = [
        len(computed) - length
        for computed in rank["preempted"]
        for ids, length in sequences
        if ids[: len(computed)] == computed and length < len(computed) < len(ids)
    ]
    assert max(interrupted, default=0) > 8


def test_responses_had_several_turns(results: dict[str, list[dict[str, Any]]]) -> None:
    assert max(row["num_turns"] for row in results["turns"][0]["rows"]) > 2
