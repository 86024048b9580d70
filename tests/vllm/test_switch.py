"""vLLM with the training weights: against the trainer's forward, and against a new engine with the exported weights."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.support.model_cases import YARN
from tests.support.ranks import run_ranks
from tests.support.tiny_models import VARIED_SETTINGS, FamilyName, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.vllm


@dataclass(frozen=True)
class Case:
    """A training layout, and the size of the replicas that generate."""

    family: FamilyName
    tied: bool
    tp: int
    generation_tp: int
    pp: int = 1
    cp: int = 1
    ep: int = 1
    weights: Literal["load", "direct"] = "load"
    seed_per_request: bool = True

    @property
    def num_ranks(self) -> int:
        return max(self.tp * self.pp * self.cp, self.ep)

    def make_model(self, folder: Path) -> Path:
        # Heads of 32, the smallest that vLLM attends to on a CPU; a vocabulary that has padding.
        experts = {"moe_intermediate_size": 64} if self.family.endswith(("_moe", "_v2", "_v3")) else {}
        if self.family.startswith("deepseek"):
            experts |= LATENT[self.family]
        settings = experts | VARIED_SETTINGS.get(self.family, {}) | {"tied": self.tied}
        if self.family == "phi3":
            settings["sliding_window"] = None  # with one in every layer, vLLM keeps no prefix of these lengths
        tiny_model(folder, self.family, vocab_size=100, hidden_size=128, head_dim=32, **settings)
        return tiny_tokenizer(folder, vocab_size=100)

    def arguments(self, model: Path, export: Path) -> tuple[object, ...]:
        sizes = (
            "--tp",
            self.tp,
            "--pp",
            self.pp,
            "--cp",
            self.cp,
            "--ep",
            self.ep,
            "--generation-tp",
            self.generation_tp,
        )
        seeds = ["--seed-per-request"] if self.seed_per_request else []
        return ("--model", model, "--export", export, *sizes, "--weights", self.weights, *seeds)


LATENT: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16, "q_lora_rank": None,
        "topk_method": "group_limited_greedy", "num_layers": 4,
    },
    "deepseek_v3": {
        "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16, "q_lora_rank": 24, "kv_lora_rank": 32,
        "rope_parameters": YARN | {"original_max_position_embeddings": 64, "mscale": 0.7},
    },
}  # fmt: skip

CASES = {
    "tp2 to tp2": Case("llama", tied=False, tp=2, generation_tp=2),
    "tp2 to two replicas": Case("qwen2", tied=True, tp=2, generation_tp=1),
    "tp2 pp2 to tp4": Case("qwen3", tied=True, tp=2, pp=2, generation_tp=4),
    "ep2 to tp2": Case("qwen3_moe", tied=False, tp=1, ep=2, generation_tp=2),
    "gemma2 tp2 to two replicas": Case("gemma2", tied=True, tp=2, generation_tp=1),
    "phi3 tp2 to tp2, direct": Case("phi3", tied=False, tp=2, generation_tp=2, weights="direct"),
    "tp2 to tp2, direct": Case("qwen2", tied=True, tp=2, generation_tp=2, weights="direct", seed_per_request=False),
    "cp2 to tp2, direct": Case("qwen3", tied=False, tp=1, cp=2, generation_tp=2, weights="direct"),
    "ep2 to tp2, direct": Case("qwen3_moe", tied=False, tp=1, ep=2, generation_tp=2, weights="direct"),
    "mixtral tp2 ep2 to tp2, direct": Case("mixtral", tied=False, tp=2, ep=2, generation_tp=2, weights="direct"),
    "deepseek_v2 pp2 to tp2": Case("deepseek_v2", tied=False, tp=1, pp=2, generation_tp=2),
    "deepseek_v3 tp2 to two replicas": Case("deepseek_v3", tied=False, tp=2, generation_tp=1),
    "deepseek_v3 ep2 to tp2, direct": Case("deepseek_v3", tied=False, tp=1, ep=2, generation_tp=2, weights="direct"),
}


def with_published_keys(folder: Path) -> None:
    """Adds the keys of published DeepSeek-V3 folders that Hugging Face's class saves none of; the new engine needs them
    (megappo's own is told)."""
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] == "deepseek_v3":
        config |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        (folder / "config.json").write_text(json.dumps(config))


@dataclass(frozen=True)
class Outcome:
    """What the program of a case wrote, and what a new engine says of the weights that it left."""

    name: str
    case: Case
    result: dict[str, Any]
    fresh: list[dict[str, Any]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """A crashed run, then the cases, two at a time."""
    root = tmp_path_factory.mktemp("vllm")
    models = {name: case.make_model(root / name.replace(" ", "-").replace(",", "")) for name, case in CASES.items()}

    def run(name: str) -> Outcome:
        case, export = CASES[name], root / f"{models[name].name}-export"
        result = run_ranks(
            "tests.vllm.programs.switch",
            *case.arguments(models[name], export),
            nproc=case.num_ranks,
            timeout=500,
            torchrun=True,
        )
        with_published_keys(export)
        fresh = run_ranks(
            "tests.vllm.programs.fresh", "--model", export, "--prompts", result["prompts"], nproc=1, torchrun=True
        )
        return Outcome(name, case, result, fresh)

    crashing = next(iter(CASES))
    arguments = CASES[crashing].arguments(models[crashing], root / "no-export")
    run_ranks("tests.vllm.programs.switch", *arguments, "--crash", nproc=CASES[crashing].num_ranks, torchrun=True)
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(CASES, pool.map(run, CASES), strict=True))


@pytest.fixture(params=list(CASES))
def outcome(request: pytest.FixtureRequest, outcomes: dict[str, Outcome]) -> Outcome:
    return outcomes[request.param]


def test_the_engine_computes_what_the_trainer_computes(outcome: Outcome) -> None:
    differences = outcome.result["differences"]
    assert max(differences[name] for name in ("imported", "update", "sampled")) < 1e-4
    assert outcome.result["changed"], "the update changes what is generated, or the test shows nothing"


def test_the_engine_is_a_new_engine_with_the_exported_weights(outcome: Outcome) -> None:
    assert [each["tokens"] for each in outcome.result["greedy"]] == [each["tokens"] for each in outcome.fresh]
    pairs = zip(outcome.result["greedy"], outcome.fresh, strict=True)
    assert all(each["log_probs"] == pytest.approx(new["log_probs"], abs=1e-5) for each, new in pairs)


def test_a_prefix_cache_that_is_kept_is_wrong(outcome: Outcome) -> None:
    assert outcome.result["differences"]["stale cache"] > 1e-2


def test_replicas_are_strided_over_the_training_grid(outcomes: dict[str, Outcome]) -> None:
    assert {name: outcome.result["replicas"] for name, outcome in outcomes.items()} == {
        "tp2 to tp2": [[0, 1]],
        "tp2 to two replicas": [[0], [1]],
        "tp2 pp2 to tp4": [[0, 2, 1, 3]],
        "ep2 to tp2": [[0, 1]],
        "tp2 to tp2, direct": [[0, 1]],
        "cp2 to tp2, direct": [[0, 1]],
        "ep2 to tp2, direct": [[0, 1]],
        "gemma2 tp2 to two replicas": [[0], [1]],
        "phi3 tp2 to tp2, direct": [[0, 1]],
        "mixtral tp2 ep2 to tp2, direct": [[0, 1]],
        "deepseek_v2 pp2 to tp2": [[0, 1]],
        "deepseek_v3 tp2 to two replicas": [[0], [1]],
        "deepseek_v3 ep2 to tp2, direct": [[0, 1]],
    }


def test_noise_belongs_to_the_key(outcome: Outcome) -> None:
    assert outcome.result["same again"] and outcome.result["ranks agree"]
    assert outcome.result["same alone"] or not outcome.case.seed_per_request
    assert outcome.result["same prompt"] == [True, False], "greedy twice the same, with other noise not"


def test_random_numbers_and_threads_are_left_alone(outcome: Outcome) -> None:
    assert outcome.result["unchanged"] == {"start": True, "use": True}


def test_responses_end_where_they_should(outcome: Outcome) -> None:
    result = outcome.result
    greedy = result["greedy first"]
    assert len(greedy) == 12 and result["length"] == "length"
    assert result["stop token"] == [greedy[: greedy.index(greedy[3]) + 1], "stop"]
    *ended, token = result["stop string"]
    assert ended == [greedy[: greedy.index(token) + 1], "stop"]
    assert result["text"]


def test_top_k_and_top_p_cut_the_distribution_whose_log_probs_are_given(outcome: Outcome) -> None:
    greedy = outcome.result["greedy first"]
    assert outcome.result["top-k 1"] == [greedy, True]
    assert outcome.result["top-p"] == [greedy, 0.0]


def test_replicas_answer_alone(outcome: Outcome) -> None:
    # Requests of one replica are more than those of another; a group's ranks give the same.
    expected = [each["tokens"] for each in outcome.result["greedy"]]
    assert all(answer == [expected[own]] * (own + 1) for own, answer in outcome.result["alone"])


def test_requests_that_cannot_be_are_refused_before_anything_runs(outcome: Outcome) -> None:
    result = outcome.result
    assert result["empty"] == []
    assert result["too long"].startswith("DataError: prompt 1 has 250 tokens, with max_tokens 12 over the model's 256")
    assert result["too cold"].startswith("ConfigError: sampling temperature: 0.001")
    assert result["refused asleep"].startswith("AssertionError: generate was called while training has its turn")
    assert result["afterwards"], "the engine goes on after refusals"


def test_progress_counts_what_is_finished(outcome: Outcome) -> None:
    done = [number for number, _ in outcome.result["progress"]]
    assert done == sorted(set(done)) and done[-1] == 5
    assert {of for _, of in outcome.result["progress"]} == {5}


EXPERT_BYTES = 3 * 64 * 128 * 4
"""Of one of the four experts that each of two layers has."""


def test_bytes_of_a_switch(outcome: Outcome) -> None:
    report = outcome.result["report"]
    all_but_five_norms = outcome.result["weight bytes"] - 5 * 128 * 4
    # By hand: each of two ranks receives all of the other's shards; directly, it receives what its generation shard
    # lacks, which is half of each of the other's experts.
    received = {
        "tp2 to tp2": all_but_five_norms,
        "tp2 to two replicas": all_but_five_norms,
        "ep2 to tp2": 2 * 2 * EXPERT_BYTES,
        "tp2 to tp2, direct": 0,
        "cp2 to tp2, direct": 0,
        "ep2 to tp2, direct": 2 * 2 * EXPERT_BYTES // 2,
    }.get(outcome.name)
    if received is not None:
        assert (report["bytes_sent"], report["bytes_received"]) == (received, received)
    assert (report["bytes_aliased"] > 0) == (outcome.case.weights == "direct")
    # A CPU's engine sleeps with all that it has: a cache of 1 GiB, unless told, and its weights.
    assert report["held"]["awake"] == report["held"]["asleep"] >= 2**30


def test_groups_of_training_outlive_the_engine(outcome: Outcome) -> None:
    ranks, expected = outcome.result["ranks after the end"]
    assert ranks == expected
