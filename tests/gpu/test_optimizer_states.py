"""Transformer Engine's AdamW with float32 and smaller states, on one GPU and on recorded rollouts. `make test-gpu`."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.parity import OVERLAP, read_folder, write_experiment
from tests.support.ranks import run_ranks
from tests.support.tiny_models import tiny_model, tiny_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine"),
    pytest.mark.skipif(importlib.util.find_spec("transformer_engine_torch") is None, reason="no Transformer Engine"),
]


def both(*settings: str) -> str:
    return ",".join(f"{role}.optim.{setting}" for role in ("actor", "critic") for setting in settings)


COMMON = "model.dtype=bfloat16,model.layers=auto,trainer.total_steps=4"
AWARE = both("use_precision_aware_optimizer=true")
BF16 = f"{AWARE},{both('exp_avg_dtype=bfloat16', 'exp_avg_sq_dtype=bfloat16')}"
SMALLEST = both(
    "use_precision_aware_optimizer=true", "exp_avg_dtype=float16", "exp_avg_sq_dtype=float16",
    "main_params_dtype=float16", "main_grads_dtype=bfloat16", "grad_reduce_in_fp32=false",
)  # fmt: skip
SAVES = "trainer.save_freq=2"
RUNS = {
    "plain": "",
    "fp32": f"{AWARE},{SAVES}",
    "fp32-overlap": f"{AWARE},{OVERLAP}",
    "bf16": f"{BF16},{SAVES}",
    "bf16-overlap": f"{BF16},{OVERLAP},actor.offload.optimizer=true,critic.offload.params=true",
    "smallest": f"{SMALLEST},{OVERLAP}",
}
RESUMED = {
    "fp32-resumed": (AWARE, "fp32"),
    "bf16-resumed": (f"{BF16},{OVERLAP}", "bf16"),
    "plain-resumed": ("", "fp32"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, dict[str, Any]]:
    sizes = {"tied": True, "hidden_size": 128, "num_heads": 4}
    actor = tiny_tokenizer(tiny_model(folder / "actor", "qwen2", **sizes))
    critic = tiny_tokenizer(tiny_model(folder / "critic", "qwen2", value_head=True, seed=1, **sizes))
    config = write_experiment(folder, actor, critic)
    words = [f"{name}={COMMON},{overrides}".rstrip(",") for name, overrides in RUNS.items()]
    for name, (overrides, saved) in RESUMED.items():
        resume = f"trainer.resume={folder / saved / 'run' / 'checkpoints' / 'step-000002'}"
        words.append(",".join(filter(None, [f"{name}={COMMON}", resume, overrides])))
    found = run_ranks(
        "tests.distributed.programs.parity", "--config", config, "--folder", folder, "--runs", *words, nproc=1,
        timeout=900, torchrun=True
    )  # fmt: skip
    return dict(found)


@pytest.mark.parametrize(
    ("name", "moments", "main", "gradients"),
    [
        ("plain", "float32", None, "float32"),
        ("fp32", "float32", "float32", "float32"),
        ("fp32-overlap", "float32", "float32", "float32"),
        ("bf16", "bfloat16", "float32", "float32"),
        ("bf16-overlap", "bfloat16", "float32", "float32"),
        ("bf16-resumed", "bfloat16", "float32", "float32"),
        ("smallest", "float16", "float16", "bfloat16"),
    ],
)
def test_types_and_bytes(
    runs: dict[str, dict[str, Any]], name: str, moments: str, main: str | None, gradients: str
) -> None:
    """One rank keeps a moment of each parameter: as many bytes as its type has."""
    expected = {"exp_avg": moments, "exp_avg_sq": moments} | ({} if main is None else {"master_param": main})
    for role, state in runs[name]["states"].items():
        assert state["optimizer"].startswith("transformer_engine."), role
        size = state["parameters"]
        assert {key: state[key] for key in state.keys() - {"optimizer", "parameters", "grads"}} == {
            key: [f"torch.{dtype}", size, size * getattr(torch, dtype).itemsize] for key, dtype in expected.items()
        }
        # A value head keeps float32.
        assert f"torch.{gradients}" in state["grads"] and set(state["grads"]) <= {f"torch.{gradients}", "torch.float32"}


# The most that weights may have moved otherwise, ‖Δ − Δ₀‖ / ‖Δ₀‖ over all of them, against other states. Not tensor by
# tensor: what a norm's bfloat16 weights of 1 move by in four steps is less than their spacing.
@pytest.mark.parametrize(
    ("name", "reference", "limit"),
    [
        ("fp32", "plain", 0.1),
        ("fp32-overlap", "fp32", 0.1),
        ("fp32-resumed", "fp32", 0.1),
        ("plain-resumed", "plain", 0.1),
        ("bf16", "fp32", 0.25),
        ("bf16-overlap", "bf16", 0.1),
        ("bf16-resumed", "bf16", 0.1),
        ("smallest", "fp32", 0.25),
    ],
)
def test_weights_move_alike(
    runs: dict[str, dict[str, Any]], folder: Path, name: str, reference: str, limit: float
) -> None:
    for role in ("actor", "critic"):
        ours, theirs, origin = (read_folder(folder / place) for place in (
            f"{name}/{role}-weights", f"{reference}/{role}-weights", role
        ))  # fmt: skip
        start = {key: origin.get(key, torch.zeros_like(tensor)) for key, tensor in theirs.items()}
        moved = torch.cat([(tensor - start[key]).flatten() for key, tensor in theirs.items()])
        apart = torch.cat([(ours[key] - tensor).flatten() for key, tensor in theirs.items()])
        assert moved.norm() > 0
        relative = float(apart.norm() / moved.norm())
        print(f"{name} {reference} {role} {relative:.3g}")
        assert relative <= limit, role


@pytest.mark.parametrize("name", [*list(RUNS)[1:], *RESUMED])
def test_losses_are_alike(runs: dict[str, dict[str, Any]], name: str) -> None:
    plain = {line["step"]: line for line in runs["plain"]["metrics"]}
    lines = [line for line in runs[name]["metrics"] if line["step"]]
    assert [line["step"] for line in lines] == ([3, 4] if name in RESUMED else [1, 2, 3, 4])
    for line in lines:
        for key in ("actor/pg_loss", "actor/kl_loss", "actor/entropy", "critic/vf_loss"):
            expected = plain[line["step"]][key]
            assert abs(line[key] - expected) <= 0.02 * max(abs(expected), 1.0), (name, line["step"], key)
