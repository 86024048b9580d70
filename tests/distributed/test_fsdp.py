"""Whole runs whose data-parallel ranks share all parameters: what they learn, hold, save and export."""

import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.parity import Difference, largest_difference, read_folder
from tests.support.ranks import run_ranks
from tests.support.runs import differing_metrics, learning, write_run_experiment
from tests.support.tiny_models import tiny_model

ROLES = ("actor", "critic", "ref")
CUT = ",".join(f"{role}.fsdp.enable=true" for role in ROLES)
PLAIN = "actor.optim.use_distributed_optimizer=false,critic.optim.use_distributed_optimizer=false"
BFLOAT16 = "model.dtype=bfloat16,data.val_files=[],trainer.test_freq=0"
STEPS = "trainer.total_steps=3,trainer.test_freq=2,trainer.save_last=false,trainer.export_hf=true"
# Sums over ranks have another order; a tiny model's log-probs are near -5.
METRIC_LIMIT = 1e-5
WEIGHT_LIMIT = 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fsdp")


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Any]:
    write_run_experiment(folder)
    two = {"cut": f"{CUT},trainer.save_freq=2", "resumed": f"{CUT},{resumed(folder, 'cut')}"}
    # Another model than the actor's: the first step's KL is no zero.
    tiny_model(folder / "other", "llama", tied=True, seed=1)
    adapters = f"model.lora.rank=4,model.lora.export_merged=true,ref.path={folder}/other"
    two["adapters-cut-ref"] = f"{adapters},ref.fsdp.enable=true"
    return run_all(folder, {2: two, 1: {"one": "", "adapters-one": adapters}})


@pytest.fixture(scope="module")
def crossed(folder: Path, runs: dict[str, Any]) -> dict[str, Any]:
    """Runs that go on as another kind than they were; on the ranks of `plain`, the optimizer is nobody's part."""
    two = {
        "plain": f"{PLAIN},trainer.save_freq=2",
        "cut-to-plain": f"{PLAIN},{resumed(folder, 'cut')}",
        "plain-to-cut": f"{CUT},{resumed(folder, 'plain')}",
        "cut-to-tp2": f"{PLAIN},layout.tp=2,{resumed(folder, 'cut')}",
        "cut-own-layout": f"{CUT},rollout.tensor_model_parallel_size=2",
        "cut-bfloat16": f"{CUT},{BFLOAT16}",
        "plain-bfloat16": f"{PLAIN},{BFLOAT16}",
    }
    found = run_all(folder, {2: two, 1: {"cut-to-one": f"{PLAIN},{resumed(folder, 'cut')}"}})
    with pytest.raises(AssertionError, match=r"its optimizer is of another kind, and has no optimizer\.state\.param"):
        run_all(folder, {1: {"cut-to-distributed": resumed(folder, "cut")}})
    return found


def resumed(folder: Path, run: str) -> str:
    return f"trainer.resume={folder}/{run}/checkpoints/step-000002"


def run_all(folder: Path, named: dict[int, dict[str, str]]) -> dict[str, Any]:
    """What each run left. `named`: number of ranks → name → overrides."""
    found: dict[str, Any] = {}
    for num_ranks, runs in named.items():
        words = [f"{name}=trainer.run_dir={folder / name},{STEPS},{more}".strip(",") for name, more in runs.items()]
        config = folder / "experiment.yaml"
        found |= run_ranks(
            "tests.distributed.programs.fsdp", "--config", config, "--runs", *words, nproc=num_ranks, timeout=600
        )
    return found


def differing(folder: Path, name: str, reference: str, after: int = 0) -> dict[int, list[str]]:
    """Step → metrics that two runs have otherwise, after step `after`. What the switch moves is its layout's."""
    runs = folder / name, folder / reference
    return differing_metrics(*runs, after, limit=METRIC_LIMIT, without=("hybrid/",))


def moved_otherwise(folder: Path, name: str, reference: str) -> Difference:
    """Of the exported tensors, the one whose change since the start differs most in two runs."""
    exported = [folder / run / "hf" / "step-000003" for run in (name, reference)]
    return largest_difference(*exported, origin=folder / "model")


def test_a_run_learns_what_one_rank_learns(runs: dict[str, Any], folder: Path) -> None:
    assert differing(folder, "cut", "one") == {1: [], 2: [], 3: []}
    assert moved_otherwise(folder, "cut", "one").relative <= WEIGHT_LIMIT


def test_a_reference_beside_adapters_is_cut_and_has_the_log_probs_of_one_rank(
    runs: dict[str, Any], folder: Path
) -> None:
    """Its model is another one than the actor's: the KL of all steps is that of log-probs which differ."""
    assert differing(folder, "adapters-cut-ref", "adapters-one") == {1: [], 2: [], 3: []}
    assert moved_otherwise(folder, "adapters-cut-ref", "adapters-one").relative <= WEIGHT_LIMIT
    assert all(abs(line["kl/mean"]) > 0.1 for line in learning(folder / "adapters-one"))
    (whole,) = runs["adapters-one"]["ranks"]
    for rank in runs["adapters-cut-ref"]["ranks"]:
        assert rank["held"]["ref"]["params"] == whole["held"]["ref"]["params"] // 2 > 10_000


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["plain", "cut-own-layout", "cut-to-plain", "plain-to-cut", "cut-to-one", "cut-to-tp2"]
)
def test_a_run_goes_on_as_one_of_another_kind(crossed: dict[str, Any], folder: Path, name: str) -> None:
    steps = [3] if "-to-" in name else [1, 2, 3]
    assert differing(folder, name, "one", after=steps[0] - 1) == {step: [] for step in steps}
    assert moved_otherwise(folder, name, "one").relative <= WEIGHT_LIMIT


@pytest.mark.slow
def test_bfloat16_computes_with_parts_that_are_float32(crossed: dict[str, Any], folder: Path) -> None:
    """As with DDP, whose optimizer has float32 copies: exports differ where a sum's order has turned a rounding."""
    assert moved_otherwise(folder, "cut-bfloat16", "plain-bfloat16").relative <= 0.02
    (first, *_), (plain, *_) = (learning(folder / run) for run in ("cut-bfloat16", "plain-bfloat16"))
    assert first["actor/grad_norm"] == pytest.approx(plain["actor/grad_norm"], rel=1e-3)
    whole = crossed["plain-bfloat16"]["ranks"][0]["held"]["actor"]
    for rank in crossed["cut-bfloat16"]["ranks"]:
        held, numel = rank["held"]["actor"], rank["held"]["actor"]["numel"]
        assert [held[kind] for kind in ("params", "grads", "optimizer")] == [2 * numel, 2 * numel, 4 * numel]
        assert math.isclose(sum(whole[kind] for kind in ("params", "grads", "optimizer")), 18 * numel, rel_tol=0.02)


def test_a_resumed_run_is_the_run_without_the_break_bit_for_bit(runs: dict[str, Any], folder: Path) -> None:
    assert learning(folder / "resumed", 2) == learning(folder / "cut", 2)
    ours, theirs = ([rank["trained"] for rank in runs[run]["ranks"]] for run in ("resumed", "cut"))
    assert ours == theirs and ours[0] != ours[1], "each rank has a part of its own"
    assert largest_difference(*(folder / run / "hf" / "step-000003" for run in ("resumed", "cut"))).relative == 0


def test_an_export_writes_the_weights_that_were_read(runs: dict[str, Any], folder: Path) -> None:
    ours, theirs = read_folder(folder / "cut-untrained"), read_folder(folder / "model")
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in theirs)


def test_a_rank_holds_its_part_of_everything(runs: dict[str, Any]) -> None:
    """Of n float32 parameters on 2 ranks: 4 n / 2 bytes, as many of gradients, and two moments of each."""
    (plain,) = runs["one"]["ranks"]
    for ours in runs["cut"]["ranks"]:
        for role in ROLES:
            cut, whole = ours["held"][role], plain["held"][role]
            numel = whole["numel"]
            assert cut["numel"] == numel > 10_000 and cut["gathered"] == 0
            expected = {"params": 4 * numel, "grads": 4 * numel, "optimizer": 8 * numel}
            for kind, size in expected.items():
                if role == "ref" and kind != "params":
                    assert cut[kind] == whole[kind] == 0
                    continue
                assert cut[kind] == size // 2, (role, kind)
                # DDP pads its buffers.
                assert math.isclose(whole[kind], size, rel_tol=0.02), (role, kind)


def test_generation_holds_the_whole_actor(runs: dict[str, Any]) -> None:
    numel = runs["cut"]["ranks"][0]["held"]["actor"]["numel"]
    assert all(rank["alone"] for rank in runs["cut"]["ranks"]), "data-parallel ranks generate each at its own pace"
    for line in runs["cut"]["metrics"][:3]:
        assert line["hybrid/held_asleep_bytes"] == 0
        assert line["hybrid/held_awake_bytes"] == line["hybrid/held_weights_bytes"] == 4 * numel
    assert {line["hybrid/held_awake_bytes"] for line in runs["one"]["metrics"][:3]} == {0}
