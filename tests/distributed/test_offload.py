"""A run whose roles wait in host memory is the run without, bit for bit, and holds what its phases need."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.runs import EVERYTHING_OFFLOADED, write_run_experiment

pytestmark = pytest.mark.slow  # in short: test_together.py

STEPS = "trainer.total_steps=3,trainer.test_freq=2,trainer.save_last=false"
BF16 = "model.dtype=bfloat16,actor.optim.use_distributed_optimizer=false,data.val_files=[],trainer.test_freq=0"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("offload")

    def at(name: str, *overrides: str) -> str:
        return ",".join([f"{name}=trainer.run_dir={folder / name}", STEPS, *overrides])

    resume = f"trainer.resume={folder}/offloaded/checkpoints/step-000002"
    words = [
        at("plain"),
        at("offloaded", EVERYTHING_OFFLOADED, "trainer.save_freq=2"),
        at("resumed", EVERYTHING_OFFLOADED, resume),
        at("resumed-plain", resume),
        at("plain-bf16", BF16),
        at("offloaded-bf16", BF16, EVERYTHING_OFFLOADED),
    ]
    config = write_run_experiment(folder)
    return dict(run_ranks("tests.distributed.programs.offload", "--config", config, "--runs", *words, nproc=2))


@pytest.mark.parametrize(
    ("name", "reference"),
    [("offloaded", "plain"), ("resumed", "plain"), ("resumed-plain", "plain"), ("offloaded-bf16", "plain-bf16")],
)
def test_weights_and_optimizers_are_the_same_bit_for_bit(runs: dict[str, Any], name: str, reference: str) -> None:
    ours, theirs = ([rank["trained"] for rank in runs[run]["ranks"]] for run in (name, reference))
    assert ours == theirs
    assert len({rank["actor"]["optimizer"] for rank in ours}) == (1 if "bf16" in name else 2), "shards differ"


def test_what_was_learned_is_the_same(runs: dict[str, Any]) -> None:
    def learned(name: str) -> list[dict[str, Any]]:
        clocks = ("time/", "perf/", "memory/", "wall_time", "hybrid/", "rollout/tokens_per_second")
        return [{key: line[key] for key in line if not key.startswith(clocks)} for line in runs[name]["metrics"]]

    assert learned("offloaded") == learned("plain") and len(learned("plain")) == 3
    assert "eval/held_out/reward" in runs["offloaded"]["metrics"][1]


@pytest.mark.parametrize("name", ["offloaded", "offloaded-bf16"])
def test_a_phase_holds_what_it_needs(runs: dict[str, Any], name: str) -> None:
    """Bytes on the device when each phase ends, against those of the roles when everything is there."""
    whole = runs[name]["ranks"][0]["whole"]
    actor, critic, ref = (whole[role] for role in ("actor", "critic", "ref"))
    # Both training roles have moments, twice a float32 for each parameter of the rank's shard.
    assert min(role[kind] for role in (actor, critic) for kind in role) > 0
    everything = {kind: actor[kind] + critic[kind] + ref[kind] for kind in actor}
    for number, line in enumerate(runs[name]["metrics"][:3]):

        def held(phase: str, line: dict[str, Any] = line) -> tuple[float, ...]:
            return tuple(line[f"memory/{phase}/{kind}"] for kind in ("params", "grads", "optimizer"))

        assert held("rollout") == (actor["params"], 0, 0)
        assert held("old_log_probs") == (actor["params"], 0, 0)
        assert held("ref_log_probs") == (ref["params"], 0, 0)
        assert held("values") == (critic["params"], 0, 0)
        assert held("advantages") == (0, 0, 0)
        assert held("update_critic") == (critic["params"], critic["grads"], critic["optimizer"])
        assert held("update_actor") == (actor["params"], actor["grads"], actor["optimizer"])
        # Gradients are not kept, and moments are made by the first update.
        if number:
            assert line["memory/advantages/host"] == everything["params"] + everything["optimizer"]
    after = runs[name]["ranks"][0]["after"]
    assert all(size == 0 for role in after.values() for size in role.values())


def test_nothing_is_said_of_memory_without_offload(runs: dict[str, Any]) -> None:
    assert not [key for line in runs["plain"]["metrics"] for key in line if key.startswith("memory/")]


def test_one_kind_alone(tmp_path: Path) -> None:
    """The other kinds stay where they are."""
    import torch

    from megappo.engines.offload import RoleMemory

    parameter, moment = torch.arange(6.0), torch.arange(12.0)
    view = parameter[2:4]
    memory = RoleMemory(
        {"params": lambda: [parameter, view], "optimizer": lambda: [moment]}, ["params"], torch.device("cpu")
    )
    memory.rest()
    assert (memory.device_bytes("params"), memory.device_bytes("optimizer"), memory.host_bytes) == (0, 48, 24)
    memory.hold("params")
    memory.rest()
    assert view.tolist() == [2.0, 3.0] and memory.host_bytes == 0
    view += 1
    memory.let_go("params")
    memory.rest()
    memory.need("params", "optimizer")
    assert parameter.tolist() == [0.0, 1.0, 3.0, 4.0, 4.0, 5.0]
