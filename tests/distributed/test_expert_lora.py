"""Adapters on experts: every layout of experts makes the one-rank steps, and goes on from another one's checkpoint;
what switches leave, what is held for them, PEFT's own numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.expert_runs import assert_third_step_is_the_same, expert_models, resuming
from tests.support.parity import Runs, largest_difference, read_folder, run_layouts, write_experiment
from tests.support.ranks import run_ranks
from tests.support.tiny_models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow  # in short: test_together.py

GRADIENT_LIMIT = 1e-5
LOSS_LIMIT = 1e-5
# Of adapters, of which three steps change about a thirtieth: 1e-3 of the change.
WEIGHT_LIMIT = 3e-5
# Routed experts and a shared one, of actor and critic.
ALL = "model.lora.rank=3,critic.lora.rank=3"
# No dense parameter is trained on any rank; of the gate projections none.
EXPERTS = (
    "model.path={moe},algorithm.adv_estimator=grpo,model.lora.rank=3,model.lora.target_modules=[up_proj,down_proj]"
)
SP = "layout.tp=2,layout.sequence_parallel=true"
SEQUENTIAL = "model.experts=sequential"
PLAIN_OPTIMIZER = "actor.optim.use_distributed_optimizer=false,critic.optim.use_distributed_optimizer=false"
SAVE = "trainer.save_freq=1"
ONE_RANK = {"all": ALL, "experts": EXPERTS}
TWO_RANKS = {
    "all-pp2": f"{ALL},layout.pp=2",
    "all-ep2": f"{ALL},layout.ep=2,{SAVE}",
    "all-ep2-sequential": f"{ALL},layout.ep=2,{SEQUENTIAL},{SAVE}",
    # Whole experts on both TP ranks: copies for experts, shards for everything else.
    "all-tp2": f"{ALL},{SP}",
    "all-tp2-ep2": f"{ALL},{SP},layout.ep=2",
    "all-tp2-etp2": f"{ALL},{SP},layout.etp=2",
    # A rank's parts of experts beside whole dense layers.
    "all-etp2-plain-optimizer": f"{ALL},layout.etp=2,{PLAIN_OPTIMIZER}",
    "experts-ep2": f"{EXPERTS},layout.ep=2",
    "experts-tp2-etp2": f"{EXPERTS},{SP},layout.etp=2",
}
FOUR_RANKS = {"all-tp2-dp2-ep2-etp2": f"{ALL},{SP},layout.ep=2,layout.etp=2"}
LAYOUTS = [*TWO_RANKS, *FOUR_RANKS]
# Three steps each; a resumed run makes the third from what another one saved after the second.
RESUMED = {
    "ep2-again": (f"{ALL},layout.ep=2,{SAVE}", "all-ep2"),
    "ep2-sequential-again": (f"{ALL},layout.ep=2,{SEQUENTIAL},{SAVE}", "all-ep2-sequential"),
    "ep2-at-etp2": (f"{ALL},{SP},layout.etp=2", "all-ep2"),
    "sequential-at-pp2": (f"{ALL},layout.pp=2", "all-ep2-sequential"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("expert-lora")
    models = expert_models(folder)
    moe = tiny_tokenizer(tiny_model(folder / "moe", "qwen3_moe"))
    config = write_experiment(folder, **models)
    metrics = {}
    for nproc, named in {1: ONE_RANK, 2: TWO_RANKS | resuming(folder, RESUMED), 4: FOUR_RANKS}.items():
        filled = {name: words.replace("{moe}", str(moe)) for name, words in named.items()}
        metrics |= run_layouts(folder, config, nproc, filled)
    return Runs(folder, models, metrics)


def reference_of(name: str) -> str:
    return name.partition("-")[0]


def roles_of(name: str) -> list[str]:
    return ["actor", "critic"] if name.startswith("all") else ["actor"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_before_the_first_step_equal_one_rank(runs: Runs, name: str) -> None:
    for role in roles_of(name):
        ours, one = (runs.folder / run / f"{role}-gradients" for run in (name, reference_of(name)))
        worst = largest_difference(ours, one)
        assert worst.relative <= GRADIENT_LIMIT, (role, worst)


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_gradient_norms_and_adapters_of_all_steps_equal_one_rank(runs: Runs, name: str) -> None:
    reference = reference_of(name)
    keys = [f"{role}/grad_norm" for role in roles_of(name)]
    for ours, one in zip(runs.metrics[name], runs.metrics[reference], strict=True):
        assert all(abs(ours[key] - one[key]) <= LOSS_LIMIT * one[key] for key in keys), (ours["step"], keys)
        assert abs(ours["actor/pg_loss"] - one["actor/pg_loss"]) <= LOSS_LIMIT
    for role in roles_of(name):
        worst = largest_difference(*(runs.folder / run / f"{role}-weights" for run in (name, reference)))
        assert worst.relative <= WEIGHT_LIMIT, (role, worst)


def test_every_expert_has_adapters_of_its_own_which_learn(runs: Runs) -> None:
    """Of 2 layers: 4 projections of the attention, 4 experts' and a shared one's three. The start's B = 0 is filled."""
    gradients = read_folder(runs.folder / "all" / "actor-gradients")
    assert len(gradients) == 2 * (4 + 3 * (4 + 1)) * 2
    assert all(float(tensor.norm()) > 0 for tensor in gradients.values())
    assert not any("router" in name or ".gate." in name for name in gradients)


@pytest.mark.parametrize("name", ["all-ep2", "all-ep2-sequential"])
def test_a_resumed_run_is_the_same_to_the_bit(runs: Runs, name: str) -> None:
    """Metrics of the third step; the adapters and optimizer state that were written after it."""
    again = f"{name.removeprefix('all-')}-again"
    saved = assert_third_step_is_the_same(runs.folder / name / "run", runs.folder / again / "run")
    assert any("exp_avg_sq" in key and "lora_A" in key for key in saved)


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("name", [name for name in RESUMED if not name.endswith("-again")])
def test_a_checkpoint_goes_on_where_experts_are_laid_out_otherwise(runs: Runs, name: str, role: str) -> None:
    _, source = RESUMED[name]
    worst = largest_difference(*(runs.folder / run / f"{role}-weights" for run in (name, source)))
    assert worst.relative <= WEIGHT_LIMIT, worst


# Everything of a model with a shared expert; two projections of the experts of one without.
MODELS = {"all": "qwen2_moe", "experts": "qwen3_moe", "own-layout": "qwen2_moe"}


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """Where `programs/lora.py` wrote, and what it found."""
    folder = tmp_path_factory.mktemp("inside")
    for family in ("qwen2_moe", "qwen3_moe"):
        tiny_tokenizer(tiny_model(folder / family, family))
    config = write_experiment(folder, folder / "qwen2_moe", folder / "qwen2_moe")
    grpo = ["algorithm.adv_estimator=grpo", "model.lora.rank=3"]
    runs = {
        "all": (1, [*grpo, SEQUENTIAL]),
        "experts": (
            1,
            [*EXPERTS.replace("up_proj,", "up_proj;").replace("{moe}", str(folder / "qwen3_moe")).split(",")],
        ),
        # Merged copies of experts in another layout.
        "own-layout": (2, [*grpo, *SP.split(","), "layout.etp=2", "rollout.tensor_model_parallel_size=1"]),
    }
    results = {}
    for name, (nproc, words) in runs.items():
        overrides = [word.replace(";", ",") for word in words]
        results[name] = run_ranks(
            "tests.distributed.programs.lora", "--config", config, "--folder", folder / name, "--overrides", *overrides,
            nproc=nproc,
        )  # fmt: skip
    return folder, results


Inside = tuple[Path, dict[str, dict[str, Any]]]


@pytest.mark.parametrize("name", ["all", "experts"])
def test_new_adapters_change_no_bit_and_merged_ones_compute_the_same(inside: Inside, name: str) -> None:
    result = inside[1][name]
    assert result["equal_at_start"] and result["equal_when_off"] and result["recomputed_equal"]
    assert result["change"] > 0.1, "random adapters do change the output"
    assert result["merged_difference"] <= 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_a_hundred_switches_leave_the_frozen_weights_and_the_engine_right(inside: Inside, name: str) -> None:
    result = inside[1][name]
    assert result["base_is_unchanged"] and max(result["probes"]) <= 1e-5
    assert result["bytes_copied"] == (result["adapted_bytes"] if name == "own-layout" else 0)


def test_gradients_and_optimizer_state_are_those_of_the_adapters_alone(inside: Inside) -> None:
    """Rank 3 on 2 layers of 4 experts, up [16, 32] and down [32, 16]; float32, AdamW has two moments."""
    elements = 2 * 4 * 2 * 3 * (16 + 32)
    assert inside[1]["experts"]["bytes"] == {"optimizer": 8 * elements, "gradients": 4 * elements, "reference": 0}


@pytest.mark.parametrize("name", ["all", "experts"])
@pytest.mark.filterwarnings("ignore:.*_pattern keys did not match")  # PEFT looks for them among modules alone (0.21)
def test_peft_computes_the_same_log_probs(inside: Inside, name: str) -> None:
    peft = pytest.importorskip("peft")
    import transformers

    folder, _ = inside
    ours = load_file(folder / name / "forward.safetensors")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / MODELS[name], dtype=torch.float32)
    with torch.no_grad():
        plain = base(ours["tokens"]).logits.log_softmax(-1)
        model = peft.PeftModel.from_pretrained(base, folder / name / "adapter")
        theirs = model(ours["tokens"]).logits.log_softmax(-1)
    found = ours["log_probs"][..., : theirs.shape[-1]]
    assert float((found - theirs).abs().max()) <= 1e-5
    assert float((found - plain).abs().max()) > 0.1
