"""Apex's kernels are taken where they can be imported, train as torch's do, and the run says which it has."""

import json
import os
import shutil
from pathlib import Path

import pytest

from megappo.config.checkpoint_names import LATEST
from tests.support.ranks import ROOT
from tests.support.runs import learning, succeed, write_run_experiment

APEX = str(ROOT / "tests" / "support" / "apex_stand_in")
PLAIN = {
    "optimizer": "torch.AdamW",
    "gradient norm": "megatron.local_multi_tensor_l2_norm",
    "weight gradients": "torch.matmul",
}
FUSED = {
    "optimizer": "apex.FusedAdam",
    "gradient norm": "amp_C.multi_tensor_l2norm",
    "weight gradients": "fused_weight_gradient_mlp_cuda",
}


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run_experiment(tmp_path_factory.mktemp("apex"))


def train(experiment: Path, run: Path, *words: str, python_path: str = "") -> str:
    words = ("trainer.total_steps=4", "trainer.save_freq=2", f"trainer.run_dir={run}", *words)
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, [python_path, str(ROOT)]))}
    return succeed("train", experiment, *words, **environment).out


def test_a_run_with_apex_learns_the_same_and_resumes_to_the_bit(experiment: Path) -> None:
    plain, fused, resumed = (experiment.parent / name for name in ("plain", "fused", "resumed"))
    for run, python_path, kernels in ((plain, "", PLAIN), (fused, APEX, FUSED)):
        said = train(experiment, run, python_path=python_path)
        line = next(line for line in said.splitlines() if line.startswith("kernels: "))
        assert all(f"{part} {name}" in line for part, name in kernels.items()), line
        written = json.loads((run / "environment.json").read_text())["kernels"]
        assert written == {
            "attention": "megappo.CoreAttention", "linear": "megatron.RowParallelLinear", "norm": "megappo.RMSNorm"
        } | kernels  # fmt: skip

    for ours, theirs in zip(learning(fused), learning(plain), strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=1e-3, abs=1e-5), (name, ours["step"])
    assert learning(plain)[-1]["actor/grad_norm"] != learning(plain)[0]["actor/grad_norm"]

    shutil.copytree(fused, resumed, symlinks=True)
    shutil.rmtree(resumed / "checkpoints" / "step-000004")
    (resumed / "checkpoints" / LATEST).unlink()
    (resumed / "checkpoints" / LATEST).symlink_to("step-000002")
    assert "going on after step 2" in train(experiment, resumed, "trainer.resume=auto", python_path=APEX)
    assert learning(resumed) == learning(fused)
