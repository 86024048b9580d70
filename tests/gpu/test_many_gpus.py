"""Two and more GPUs of one machine through NCCL: parity with one GPU, a rank that is lost, a run that goes on.

`make test-gpu` on such a machine, or `tools/gpu_multi.sh`; where there is one GPU, or none, these skip.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from megappo.errors import ExitCode
from megappo.parallel import runtime
from tests.support.gpus import num_gpu_ranks
from tests.support.parity import OVERLAP, Runs, parity_runs
from tests.support.runs import Running, learning, succeed, write_run_experiment
from tests.support.tiny_models import FamilyName, tiny_model, tiny_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(num_gpu_ranks() < 2, reason="fewer than two CUDA GPUs on this machine"),
]

has_te = pytest.mark.skipif(not runtime.has_transformer_engine(), reason="Transformer Engine is not installed")

SP = "layout.tp=2,layout.sequence_parallel=true"
PP = "layout.pp=2"
CP = "layout.cp=2"
# By the number of GPUs; dp is what is left of it.
LAYOUTS = {
    2: {
        "tp2": "layout.tp=2",
        "tp2-sp": SP,
        "pp2": PP,
        "dp2": "",
        "dp2-overlap": OVERLAP,
        "cp2": CP,
        "cp2-a2a": f"{CP},model.cp_comm_type=a2a",
    },
    4: {
        "tp2-sp-dp2": SP,
        "tp4": "layout.tp=4",
        "tp2-pp2": f"layout.tp=2,{PP}",
        "pp2-dp2": PP,
        "dp4": "",
        "dp4-overlap": OVERLAP,
        "cp2-tp2-sp": f"{CP},{SP}",
        "cp4": "layout.cp=4",
    },
    8: {
        "tp2-sp-dp4": SP,
        "tp4-sp-pp2": f"layout.tp=4,layout.sequence_parallel=true,{PP}",
        "tp2-sp-pp2-dp2": f"{SP},{PP}",
        "pp2-dp4-overlap": f"{PP},{OVERLAP}",
        "cp2-tp2-sp-dp2": f"{CP},{SP}",
        "cp4-tp2": "layout.cp=4,layout.tp=2",
    },
}
EXPERT_LAYOUTS = {
    2: {
        "dp2": "",
        "ep2": "layout.ep=2",
        "ep2-overlap": f"layout.ep=2,{OVERLAP}",
        "tp2-sp-ep2": f"{SP},layout.ep=2",
    },
    4: {
        "ep4": "layout.ep=4",
        "ep2-dp4-overlap": f"layout.ep=2,{OVERLAP}",
        "tp2-sp-ep4": f"{SP},layout.ep=4",
        "tp2-sp-pp2-ep2": f"{SP},{PP},layout.ep=2",
    },
    8: {
        "tp2-sp-ep4": f"{SP},layout.ep=4",
        "tp2-sp-pp2-ep4": f"{SP},{PP},layout.ep=4",
    },
}
# The most that there are layouts for; CUDA_VISIBLE_DEVICES gives the smaller sizes.
SIZE = max((size for size in LAYOUTS if size <= num_gpu_ranks()), default=2)
HALF = "model.dtype=bfloat16"
# Actor and critic of the runs, by kind: family and settings.
MODELS: dict[str, dict[str, tuple[FamilyName, dict[str, Any]]]] = {
    "dense": {"actor": ("qwen3", {"tied": True}), "critic": ("llama", {"value_head": True, "seed": 1})},
    "experts": {
        "actor": ("qwen2_moe", {"tied": True}),
        "critic": ("qwen2_moe", {"tied": True, "value_head": True, "seed": 1}),
    },
}
# Transformer Engine's kernels want heads and experts of usual sizes: wider models of the same kinds.
TE_SIZES: dict[str, dict[str, Any]] = {"dense": {"hidden_size": 256, "num_kv_heads": 4}}
TE_SIZES["experts"] = TE_SIZES["dense"] | {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}


def rows(layouts: dict[str, str], folder: Path, *, with_te: bool) -> dict[str, str]:
    """Each layout in float32, as NAME-bf16 in bfloat16, both with torch's layers; and as NAME-te in bfloat16 with
    Transformer Engine's, of the models in `folder`, where there is that."""
    kinds = {"": "", "-bf16": HALF}
    if with_te:
        kinds["-te"] = f"{HALF},model.layers=te,model.path={folder / 'te-actor'},critic.path={folder / 'te-critic'}"
    return {
        name + kind: ",".join(filter(None, [text, settings]))
        for kind, settings in kinds.items()
        for name, text in layouts.items()
    }


def made_runs(folder: Path, kind: str, layouts: dict[str, str]) -> Runs:
    """All rows of the layouts, and one GPU's, in one start of ranks for each number of them."""
    for role, (family, settings) in MODELS[kind].items():
        tiny_tokenizer(tiny_model(folder / role, family, num_layers=2, **settings))
        tiny_tokenizer(tiny_model(folder / f"te-{role}", family, num_layers=2, **settings, **TE_SIZES[kind]))
    with_te = runtime.has_transformer_engine()
    wide = {1: rows({"one": ""}, folder, with_te=with_te), SIZE: rows(layouts, folder, with_te=with_te)}
    others = {name: "one-te" for named in wide.values() for name in named if name.endswith("-te")}
    return parity_runs(folder, folder / "actor", folder / "critic", wide, others)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return made_runs(tmp_path_factory.mktemp("dense"), "dense", LAYOUTS[SIZE])


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return made_runs(tmp_path_factory.mktemp("experts"), "experts", EXPERT_LAYOUTS[SIZE])


def check(runs: Runs, name: str) -> None:
    for role in ("actor", "critic"):
        gradients, changes = runs.gradients(name, role), runs.changes(name, role)
        assert gradients.relative <= 1e-5, (role, gradients)
        assert changes.relative <= 1e-3, (role, changes)
    assert runs.losses(name) <= 1e-5
    assert runs.losses(f"{name}-bf16", reference="one-bf16") <= 0.01


@pytest.mark.parametrize("name", LAYOUTS[SIZE])
def test_dense_steps_equal_one_gpus(dense: Runs, name: str) -> None:
    check(dense, name)


@pytest.mark.parametrize("name", EXPERT_LAYOUTS[SIZE])
def test_steps_with_experts_equal_one_gpus(experts: Runs, name: str) -> None:
    check(experts, name)


@has_te
@pytest.mark.parametrize("name", LAYOUTS[SIZE])
def test_dense_steps_of_transformer_engines_layers_equal_one_gpus(dense: Runs, name: str) -> None:
    assert dense.losses(f"{name}-te", reference="one-te") <= 0.01


@has_te
@pytest.mark.parametrize("name", EXPERT_LAYOUTS[SIZE])
def test_steps_with_experts_of_transformer_engines_layers_equal_one_gpus(experts: Runs, name: str) -> None:
    assert experts.losses(f"{name}-te", reference="one-te") <= 0.01


# Minibatches of four sequences: four data-parallel ranks at most.
@pytest.mark.parametrize("layout", [f"layout.dp={min(SIZE, 4)}", f"layout.tp=2,layout.dp={SIZE // 2}"])
def test_a_lost_rank_ends_the_run_and_it_goes_on_to_the_same_end(tmp_path: Path, layout: str) -> None:
    experiment = write_run_experiment(tmp_path)
    words = ["train", experiment, *layout.split(","), "actor.ppo_micro_batch_size_per_gpu=1"]
    words += ["trainer.save_freq=2", "data.val_files=[]", "trainer.test_freq=0"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    succeed(*words, f"trainer.run_dir={whole}")
    running = Running(*words, f"trainer.run_dir={parts}")
    running.wait_for_step(parts, 4, timeout=240)
    os.kill(running.rank(1).pid, signal.SIGKILL)
    finished = running.finish(timeout=60)
    assert finished.code == ExitCode.FAILED, finished.err
    assert "rank 1" in finished.err
    succeed(*words, f"trainer.run_dir={parts}", "--resume")
    resumed = {line["step"]: line for line in learning(parts)}
    for line in learning(whole):
        for name, value in line.items():
            # NCCL's sums keep their order on one machine, atomic additions of kernels may not.
            assert resumed[line["step"]][name] == pytest.approx(value, rel=1e-4, abs=1e-5), (line["step"], name)
