"""Training with communication beside computation is training without it, to the bit, on every layout and path.

In short, and against one rank: `dp2-overlap` of `test_parity.py`, `ep2-overlap` of `test_moe_parity.py`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.parity import OVERLAP, read_folder, run_layouts, write_experiment
from tests.support.ranks import run_ranks
from tests.support.runs import EVERYTHING_OFFLOADED, write_run_experiment
from tests.support.tiny_models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow

ROLES = ("actor", "critic")


def both(setting: str) -> str:
    return ",".join(f"{role}.optim.{setting}" for role in ROLES)


# Clipping divides by a norm, which sums shards in the order of the buckets.
EXACT = both("clip_grad=0")
REDUCE = f"{both('overlap_grad_reduce=true')},{both('bucket_size=4000')}"
PLAIN_OPTIMIZER = both("use_distributed_optimizer=false")
DYNAMIC = (
    "model.use_remove_padding=true,actor.use_dynamic_bsz=true,actor.ppo_micro_batch_size_per_gpu=null,"
    "actor.ppo_max_token_len_per_gpu=60,critic.ppo_max_token_len_per_gpu=100"
)
RECOMPUTE = "model.recompute_granularity=full,model.recompute_method=uniform,model.recompute_num_layers=1"
LORA = "model.lora.rank=4,model.lora.type=dora,critic.lora.rank=4"
VIRTUAL = "layout.pp=2,layout.vpp=2,actor.ppo_micro_batch_size_per_gpu=1,critic.ppo_micro_batch_size_per_gpu=2"
# name → number of ranks, model, overrides of both runs, those of the overlapped one
CASES = {
    "dp2": (2, "dense", "", OVERLAP),
    "dp2-bf16": (2, "dense", f"model.dtype=bfloat16,{both('grad_reduce_in_fp32=false')}", OVERLAP),
    "dp2-all-reduce": (2, "dense", PLAIN_OPTIMIZER, REDUCE),
    "dp2-recompute": (2, "dense", f"{DYNAMIC},{RECOMPUTE}", OVERLAP),
    "dp2-lora": (2, "dense", LORA, f"{OVERLAP},{both('bucket_size=500')}"),
    "cp2": (2, "dense", "layout.cp=2", OVERLAP),
    "ep2": (2, "moe", f"layout.ep=2,{DYNAMIC}", OVERLAP),
    "ep2-sequential": (2, "moe", "layout.ep=2,model.experts=sequential,model.moe.aux_loss_coeff=0.1", OVERLAP),
    "pp2-dp2": (4, "dense", f"layout.pp=2,{DYNAMIC}", OVERLAP),
    "pp2-dp2-lora": (4, "dense", f"layout.pp=2,{LORA},{RECOMPUTE}", f"{OVERLAP},{both('bucket_size=500')}"),
    "pp2-vpp2-dp2": (4, "dense", VIRTUAL, OVERLAP),
    "pp2-vpp2-dp2-aligned": (4, "dense", f"{VIRTUAL},{DYNAMIC}", f"{OVERLAP},{both('align_param_gather=true')}"),
    "pp2-ep2": (4, "moe", "layout.pp=2,layout.ep=2", OVERLAP),
    "tp2-sp-dp2-ep2": (4, "moe", "layout.tp=2,layout.sequence_parallel=true,layout.ep=2", OVERLAP),
}


@pytest.fixture(scope="module")
def updates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of each case, without and with: `CASE-plain`, `CASE`."""
    folder = tmp_path_factory.mktemp("updates")
    for model, family, settings in (("dense", "qwen3", {"num_layers": 4}), ("moe", "qwen2_moe", {})):
        place = folder / model
        place.mkdir()
        actor = tiny_tokenizer(tiny_model(place / "actor", family, tied=True, **settings))
        critic = tiny_tokenizer(tiny_model(place / "critic", family, tied=True, value_head=True, seed=1, **settings))
        config = write_experiment(place, actor, critic)
        for num_ranks in (2, 4):
            named = {}
            for case, (ranks, of, overrides, overlap) in CASES.items():
                if (ranks, of) == (num_ranks, model):
                    plain = f"{EXACT},{overrides}" if overrides else EXACT
                    named |= {f"{case}-plain": plain, case: f"{plain},{overlap}"}
            run_layouts(folder, config, num_ranks, named)
    return folder


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("case", CASES)
def test_gradients_and_weights_are_the_same_to_the_bit(updates: Path, case: str, role: str) -> None:
    for kind in ("gradients", "weights"):
        ours, plain = (read_folder(updates / run / f"{role}-{kind}") for run in (case, f"{case}-plain"))
        assert ours.keys() == plain.keys() and any(tensor.any() for tensor in plain.values())
        assert [name for name in plain if not torch.equal(ours[name], plain[name])] == []


STEPS = f"trainer.total_steps=3,trainer.test_freq=2,trainer.save_last=false,{EXACT}"
OWN_LAYOUT = "rollout.tensor_model_parallel_size=2"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Whole runs, in which what is generated depends on every weight of the steps before."""
    folder = tmp_path_factory.mktemp("runs")

    def at(name: str, *overrides: str) -> str:
        return ",".join([f"{name}=trainer.run_dir={folder / name}", STEPS, *overrides])

    saved, resume = "trainer.save_freq=2", "trainer.resume={}/checkpoints/step-000002"
    words = [
        at("plain", saved),
        at("overlapped", OVERLAP, saved),
        at("offloaded", OVERLAP, EVERYTHING_OFFLOADED, "trainer.export_hf=true"),
        at("own-layout", OVERLAP, OWN_LAYOUT),
        at("own-layout-plain", OWN_LAYOUT),
        at("resumed", OVERLAP, EVERYTHING_OFFLOADED, resume.format(folder / "plain")),
        at("resumed-plain", resume.format(folder / "overlapped"), "trainer.export_hf=true"),
    ]
    config = write_run_experiment(folder)
    found = dict(run_ranks("tests.distributed.programs.offload", "--config", config, "--runs", *words, nproc=2))
    exported = [read_folder(folder / run / "hf" / "step-000003") for run in ("offloaded", "resumed-plain")]
    return found | {"exported": exported}


@pytest.mark.parametrize("name", ["overlapped", "offloaded", "resumed", "resumed-plain"])
def test_whole_runs_learn_the_same(runs: dict[str, Any], name: str) -> None:
    """Generation on live shards, checks of the switch, offload, evaluation, checkpoints of and for the other kind."""
    _same_run(runs, name, "plain")


def test_generation_in_a_layout_of_its_own_has_whole_weights(runs: dict[str, Any]) -> None:
    _same_run(runs, "own-layout", "own-layout-plain")


def test_exported_weights_are_the_same(runs: dict[str, Any]) -> None:
    ours, plain = runs["exported"]
    assert plain and ours.keys() == plain.keys()
    assert all(torch.equal(ours[name], plain[name]) for name in plain)


def _same_run(runs: dict[str, Any], name: str, plain: str) -> None:
    def learned(run: str) -> dict[int, dict[str, Any]]:
        clocks = ("time/", "perf/", "memory/", "wall_time", "hybrid/", "rollout/tokens_per_second", "checkpoint")
        lines = runs[run]["metrics"]
        return {line["step"]: {key: line[key] for key in line if not key.startswith(clocks)} for line in lines}

    ours, theirs = learned(name), learned(plain)
    assert 3 in ours
    for step, line in ours.items():
        assert line.keys() == theirs[step].keys()
        for key, value in line.items():  # norms are summed in the order of the buckets
            expected = pytest.approx(theirs[step][key], rel=1e-6) if "grad_norm" in key else theirs[step][key]
            assert value == expected, (step, key)
    for rank, other in zip(runs[name]["ranks"], runs[plain]["ranks"], strict=True):
        assert [rank["trained"][role]["params"] for role in ROLES] == [
            other["trained"][role]["params"] for role in ROLES
        ]
