"""vLLM on GPUs beside a training: sleep, wake and CUDA graphs over several switches, fp8, and experts on two GPUs.

`make test-gpu` on a machine with vLLM in the same environment; where there is none, or no GPU, these skip.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megappo.config.hybrid import default_check_limit
from megappo.config.shared_gpus import ranks_per_gpu
from tests.support.gpus import num_gpu_ranks
from tests.support.near_ties import BFLOAT16, with_near_ties
from tests.support.ranks import run_ranks
from tests.support.runs import metrics, succeed, write_run_experiment
from tests.support.tiny_models import FamilyName, tiny_model, tiny_tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]
two_gpus = pytest.mark.skipif(num_gpu_ranks() < 2, reason="fewer than two CUDA GPUs on this machine")

# 8 heads and 4 KV heads of 64 numbers, 2 layers, bfloat16.
QKV_ROWS, HIDDEN, LAYERS = (8 + 4 + 4) * 64, 256, 2
QKV_BYTES = LAYERS * QKV_ROWS * HIDDEN * 2
MIB = 2**20
BF16 = default_check_limit("bfloat16", None)


def make_model(folder: Path, family: FamilyName = "qwen3", **settings: Any) -> Path:
    settings = {"hidden_size": HIDDEN, "num_heads": 8, "num_kv_heads": 4, "head_dim": 64, "vocab_size": 1000} | settings
    return tiny_tokenizer(tiny_model(folder, family, num_layers=LAYERS, **settings), 1000)


Turns = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> Turns:
    """The results of the ranks, each way of running started once."""
    made: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    folder = tmp_path_factory.mktemp("vllm")
    dense = make_model(folder / "dense", tied=True)

    def results(*arguments: object, model: Path = dense, nproc: int = 1) -> list[dict[str, Any]]:
        key = (*arguments, model, nproc)
        if key not in made:
            program = "tests.vllm.programs.turns"
            made[key] = run_ranks(
                program, "--model", model, *arguments, nproc=nproc, timeout=600, torchrun=True
            )  # fmt: skip
        return made[key]

    return results


def follows_training(switches: list[dict[str, Any]], limit: float, largest: float) -> None:
    """Greedy log-probs are the trainer's after each update, and those of the weights before it are not."""
    for switch in switches:
        assert switch["mean"] <= limit and switch["max"] <= largest, switch
    assert all(switch["stale"] > 3 * limit for switch in switches[1:]), [switch["stale"] for switch in switches]


def gives_memory_back(switches: list[dict[str, Any]]) -> None:
    """The cache comes and goes, and nothing grows at any point of a turn once each has been there once."""
    for switch in switches:
        held = switch["report"]["held"]
        assert held["awake"] - held["asleep"] > 1024 * MIB
        assert switch["used awake"] - switch["used asleep"] > 1024 * MIB
        # torch counts what is asleep as allocated: without it, no more than is in use.
        assert switch["allocated asleep"] > switch["used asleep"]
        assert switch["allocated asleep"] - switch["absent asleep"] <= switch["used asleep"]
        assert switch["absent awake"] == 0
        assert abs(switch["absent asleep"] - (held["awake"] - held["asleep"])) <= 16 * MIB
    for name in ("asleep", "with_weights", "awake"):
        sizes = [switch["report"]["held"][name] for switch in switches[1:]]
        assert max(sizes) - min(sizes) <= 16 * MIB, (name, sizes)
    asleep = [switch["used asleep"] for switch in switches[1:]]
    assert max(asleep) - min(asleep) <= 16 * MIB, asleep


def test_direct_with_graphs_over_several_switches(turns: Turns) -> None:
    (rank,) = turns("--weights", "auto")
    follows_training(rank["switches"], BF16, 5 * BF16)
    gives_memory_back(rank["switches"])
    assert [switch["worst tensor"] for switch in rank["switches"]] == [None] * 4


def test_direct_keeps_one_copy_of_the_parameters(turns: Turns) -> None:
    (rank,) = turns("--weights", "auto")
    for switch in rank["switches"]:
        report = switch["report"]
        # By hand: of several KV heads, Megatron stores q, k and v head by head, vLLM in three blocks.
        assert switch["owned bytes"] == report["bytes_copied"] == QKV_BYTES
        assert report["bytes_aliased"] == switch["training bytes"] - QKV_BYTES
        assert report["bytes_received"] == report["bytes_sent"] == 0


def test_copies_are_replayed_from_the_second_switch_on(turns: Turns) -> None:
    (rank,) = turns("--weights", "auto")
    # The first run is that of the loader's own `Switch`; the one that stays has run once, then.
    assert [switch["graph copies"] for switch in rank["switches"]] == [False, True, True, True]


@pytest.mark.parametrize("weights", ["auto", "load"])
def test_a_spoiled_tensor_is_named(weights: str, turns: Turns) -> None:
    (rank,) = turns("--weights", weights) if weights == "auto" else turns("--weights", "load", "--eager")
    assert rank["spoiled"].startswith("model.layers.1.self_attn.qkv_proj.weight (off by ")


def test_through_the_loader(turns: Turns) -> None:
    (rank,) = turns("--weights", "load", "--eager")
    follows_training(rank["switches"], BF16, 5 * BF16)
    gives_memory_back(rank["switches"])
    assert [switch["worst tensor"] for switch in rank["switches"]] == [None] * 4


def test_fp8_follows_training_within_its_rounding(turns: Turns) -> None:
    """Quantised anew in every switch, with graphs: what they read stays where it is."""
    (rank,) = turns("--weights", "auto", "--quantization", "fp8")
    limit = default_check_limit("bfloat16", "fp8")
    for switch in rank["switches"]:
        assert 0 < switch["mean"] <= limit, switch
        assert switch["worst tensor"].startswith("none can be named, for rollout.quantization fp8 rounds them")
    assert all(switch["stale"] > 2 * switch["mean"] for switch in rank["switches"][1:])
    gives_memory_back(rank["switches"])


def test_the_check_of_an_fp8_run_passes_by_its_own_limit(tmp_path: Path) -> None:
    experiment = write_run_experiment(tmp_path)
    model = make_model(tmp_path / "fp8", tied=True)
    settings = [f"model.path={model}", "model.dtype=bfloat16", "rollout.engine=vllm", "rollout.quantization=fp8"]
    settings += ["rollout.gpu_memory_utilization=0.15", "rollout.enforce_eager=true", "hybrid.check_every=1"]
    settings += ["layout.dp=1", "trainer.total_steps=3", "data.val_files=[]", "trainer.test_freq=0"]
    succeed("train", experiment, *settings, "trainer.save_last=false")
    lines = [line for line in metrics(tmp_path / "run") if line["step"]]
    assert len(lines) == 3
    for line in lines:
        assert 0 < line["hybrid/probe_diff_mean"] <= default_check_limit("bfloat16", "fp8")
        assert line["hybrid/probe_resent"] == 0
        assert line["hybrid/turn_seconds"] > line["hybrid/seconds"] > 0
        assert line["hybrid/held_awake_bytes"] > line["hybrid/held_asleep_bytes"] > 0


@two_gpus
@pytest.mark.parametrize("graphs", [True, False])
def test_experts_trained_at_ep_2_generate_at_ep_2(
    graphs: bool, turns: Turns, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("experts")
    model = make_model(folder, "qwen3_moe", num_experts=8, moe_intermediate_size=128)
    arguments = ["--ep", 2, "--generation-tp", 2, "--weights", "direct", *([] if graphs else ["--eager"])]
    ranks = turns(*arguments, model=model, nproc=2)
    assert [rank["expert parallel"] for rank in ranks] == [True, True]
    # By hand, half of q, k and v and of the output's columns; experts lie where they are trained, and are not copied.
    copied = QKV_BYTES // 2 + LAYERS * HIDDEN * 8 * 64 // 2 * 2
    for rank in ranks:
        # Where two experts are nearly as good, rounding may send a token to the other one: no limit for single tokens.
        follows_training(rank["switches"], BF16, math.inf)
        if ranks_per_gpu() == 1:  # what is in use is counted on the whole GPU
            gives_memory_back(rank["switches"])
        for switch in rank["switches"]:
            report = switch["report"]
            assert switch["owned bytes"] == report["bytes_copied"] == copied
            assert report["bytes_received"] == report["bytes_sent"] == 0
            assert switch["worst tensor"] is None
    assert ranks[1]["spoiled"].startswith("model.layers.1.self_attn.qkv_proj.weight (off by ")


def test_replay_takes_over_what_vllm_chose_in_graphs(tmp_path: Path) -> None:
    """Of eight experts between which bfloat16 chooses; what is left with replay is the rounding of everything else."""
    experiment = write_run_experiment(tmp_path)
    experts = {"num_experts": 8, "moe_intermediate_size": 128, "norm_topk_prob": True}
    model = with_near_ties(make_model(tmp_path / "ties", "qwen3_moe", **experts), BFLOAT16)
    settings = [f"model.path={model}", "model.dtype=bfloat16", "layout.dp=1", "rollout.engine=vllm", "rollout.n=4"]
    settings += ["rollout.gpu_memory_utilization=0.15", "rollout.max_num_seqs=8", "data.max_response_length=40"]
    settings += ["rollout.ignore_eos=true", "algorithm.adv_estimator=grpo", "actor.use_kl_loss=false"]
    settings += ["algorithm.use_kl_in_reward=false", "hybrid.check_limit=9", "actor.optim.lr=1e-4"]
    found = {}
    for mode in ("off", "rollout"):  # vLLM that can sleep is one of its kind in a process
        named = {mode: {"overrides": [*settings, f"actor.router_replay={mode}"], "blocks": None}}
        (tmp_path / "runs.json").write_text(json.dumps(named))
        arguments = ("--config", experiment, "--folder", tmp_path, "--runs", tmp_path / "runs.json")
        ran = run_ranks("tests.vllm.programs.experts", *arguments, nproc=1, timeout=900, torchrun=True)
        (rank,) = ran[mode]
        assert rank["graphs"], "vLLM captured no CUDA graphs"
        pairs = [pair for row in rank["rows"] for pair in zip(row["rollout"], row["old"], strict=True)]
        found[mode] = sum(abs(engine - trainer) for engine, trainer in pairs) / len(pairs)
        if mode == "rollout":
            assert rank["rollout"]["rollout/router_changed"] > 0.05
    print(found)
    assert found["rollout"] <= BF16
    assert found["rollout"] < found["off"] / 3
