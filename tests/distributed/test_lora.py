"""Low-rank adapters: every layout makes the one-rank steps; what they cost, what switches leave, PEFT's own numbers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.parity import OVERLAP, Runs, largest_difference, read_folder, run_layouts, write_experiment
from tests.support.ranks import run_ranks
from tests.support.runs import learning, megappo, succeed, write_run_experiment
from tests.support.tiny_models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow  # in short: test_together.py

GRADIENT_LIMIT = 1e-5
LOSS_LIMIT = 1e-5
LORA = "model.lora.rank=3,critic.lora.rank=3"
DORA = f"{LORA},model.lora.type=dora,critic.lora.type=dora"
MOE = 'model.path={moe},algorithm.adv_estimator=grpo,model.lora.rank=3,model.lora.target_modules=["*.self_attn.*"]'
ONLY = 'model.lora.target_modules=["{0}"],critic.lora.target_modules=["{0}"]'
# Some of what Megatron fuses: of qkv all but k, of gate and up one.
SOME = f"{DORA},{ONLY.format('[gqv]*_proj')}"
V = f"{LORA},{ONLY.format('v_proj')}"
GATE = f"{LORA},{ONLY.format('gate_proj')}"
ONE_RANK = {"one": LORA, "one-dora": DORA, "one-moe": MOE, "one-some": SOME, "one-v": V, "one-gate": GATE}
TWO_RANKS = {
    "tp2": f"{LORA},layout.tp=2",
    "tp2-sp": f"{LORA},layout.tp=2,layout.sequence_parallel=true",
    "pp2": f"{LORA},layout.pp=2",
    "tp2-dora": f"{DORA},layout.tp=2",
    "tp2-sp-dora": f"{DORA},layout.tp=2,layout.sequence_parallel=true",
    "tp2-sp-some": f"{SOME},layout.tp=2,layout.sequence_parallel=true",
    # The first rank has rows of q alone.
    "tp2-v": f"{V},layout.tp=2",
    "dp2-gate": f"{GATE},{OVERLAP}",
}
EP2 = {"ep2-moe": f"{MOE},layout.ep=2"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("lora")
    # One KV head on two ranks: a rank's share of the fused rows ends inside a head. Biases: DoRA leaves them out.
    actor = tiny_tokenizer(tiny_model(folder / "actor", "qwen2", num_kv_heads=1, tied=True))
    critic = tiny_tokenizer(tiny_model(folder / "critic", "qwen2", num_kv_heads=1, tied=True, value_head=True, seed=1))
    config = write_experiment(folder, actor, critic)
    moe = tiny_tokenizer(tiny_model(folder / "moe", "qwen3_moe"))
    one, two = ({name: words.format(moe=moe) for name, words in runs.items()} for runs in (ONE_RANK, TWO_RANKS | EP2))
    metrics = run_layouts(folder, config, 1, one) | run_layouts(folder, config, 2, two)
    return Runs(folder, {"actor": actor, "critic": critic}, metrics)


def one_rank(name: str) -> str:
    alone = f"one-{name.rpartition('-')[2]}"
    return alone if alone in ONE_RANK else "one"


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("name", TWO_RANKS)
def test_gradients_before_the_first_step_equal_one_rank(runs: Runs, name: str, role: str) -> None:
    ours, one = (runs.folder / run / f"{role}-gradients" for run in (name, one_rank(name)))
    worst = largest_difference(ours, one)
    assert worst.relative <= GRADIENT_LIMIT, worst


@pytest.mark.parametrize("name", TWO_RANKS)
def test_losses_and_gradient_norms_of_all_steps_equal_one_rank(runs: Runs, name: str) -> None:
    for ours, one in zip(runs.metrics[name], runs.metrics[one_rank(name)], strict=True):
        for key in ("actor/pg_loss", "actor/kl_loss", "actor/entropy", "critic/vf_loss"):
            assert abs(ours[key] - one[key]) <= LOSS_LIMIT * max(abs(one[key]), 1), key
        for key in ("actor/grad_norm", "critic/grad_norm"):
            assert abs(ours[key] - one[key]) <= 1e-4 * one[key], key


def test_adapters_of_the_attention_beside_spread_experts_have_the_gradients_of_one_rank(runs: Runs) -> None:
    ours, one = (runs.folder / run / "actor-gradients" for run in ("ep2-moe", "one-moe"))
    assert len(read_folder(one)) == 2 * 4 * 2
    worst = largest_difference(ours, one)
    assert worst.relative <= GRADIENT_LIMIT, worst


def test_every_adapter_has_a_gradient_and_so_has_the_value_head(runs: Runs) -> None:
    for run, num_projections, per_projection in (
        ("one", 7, 2), ("one-dora", 7, 3), ("one-some", 3, 3), ("one-v", 1, 2), ("one-gate", 1, 2),
    ):  # fmt: skip
        actor = read_folder(runs.folder / run / "actor-gradients")
        critic = read_folder(runs.folder / run / "critic-gradients")
        assert len(actor) == 2 * num_projections * per_projection
        assert critic.keys() == actor.keys() | {"base_model.model.score.weight"}
        assert all(float(tensor.norm()) > 0 for tensor in [*actor.values(), *critic.values()])


def test_the_reference_is_the_actor_without_its_adapters(runs: Runs) -> None:
    """Its KL is that of random adapters to the start, not 0 as it would be to itself."""
    first = runs.metrics["one"][0]
    assert abs(first["kl/mean"]) > 1e-3


ONE = ["lora", "dora", "dora-some"]
BFLOAT16 = ["lora-bf16", "dora-bf16"]


@dataclass(frozen=True)
class Inside:
    """What the program found, and where it wrote."""

    base: Path
    folder: Path
    results: dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Inside:
    folder = tmp_path_factory.mktemp("inside")
    actor = tiny_tokenizer(tiny_model(folder / "actor", "qwen2", num_kv_heads=1, tied=True))
    config = write_experiment(folder, actor, actor)
    small = ["algorithm.adv_estimator=grpo", "model.lora.rank=3"]
    runs: dict[str, tuple[int, list[str]]] = {
        "lora": (1, small),
        "dora": (1, [*small, "model.lora.type=dora"]),
        "dora-some": (1, [*small, "model.lora.type=dora", 'model.lora.target_modules=["[gqv]*_proj"]']),
        **{
            f"{kind}-bf16": (1, [*small, f"model.lora.type={kind}", "model.dtype=bfloat16"])
            for kind in ("lora", "dora")
        },
        "full": (1, [small[0]]),
        # A layout of its own for generation, which gets merged copies.
        "own-layout": (2, [*small, "layout.tp=2", "rollout.tensor_model_parallel_size=1", "model.lora.type=dora"]),
    }
    results = {
        name: run_ranks(
            "tests.distributed.programs.lora", "--config", config, "--folder", folder / name, "--overrides", *words,
            nproc=nproc,
        )
        for name, (nproc, words) in runs.items()
    }  # fmt: skip
    return Inside(actor, folder, results)


@pytest.mark.parametrize("name", [*ONE, *BFLOAT16])
def test_new_adapters_and_such_that_are_off_change_no_bit(inside: Inside, name: str) -> None:
    result = inside.results[name]
    assert result["equal_at_start"] and result["equal_when_off"] and result["merged_is_base_at_start"]
    assert result["change"] > 0.1, "random adapters do change the output"


@pytest.mark.parametrize("name", ONE)
def test_merged_weights_compute_what_adapters_beside_them_do(inside: Inside, name: str) -> None:
    assert inside.results[name]["merged_difference"] <= 1e-5


def test_merging_rounds_dora_in_bfloat16_as_it_does_plain_adapters(inside: Inside) -> None:
    """Each weight once: what remains is that of another place of the rounding, as with LoRA."""
    lora, dora = (inside.results[name]["merged_mean"] for name in BFLOAT16)
    print(f"\nmean difference of merged log-probs in bfloat16: LoRA {lora:.5f}, DoRA {dora:.5f}")
    assert 0 < dora <= 1.1 * lora


@pytest.mark.parametrize("name", BFLOAT16)
def test_a_merged_weight_in_bfloat16_is_rounded_once(inside: Inside, name: str) -> None:
    """Of the product in float64, with lengths as PEFT (0.21) has them: in the weights' type."""
    base = load_file(inside.base / "model.safetensors")
    merged = load_file(inside.folder / name / "merged" / "model.safetensors")
    adapter = load_file(inside.folder / name / "adapter" / "adapter_model.safetensors")
    for prefix in (tensor.removesuffix(".lora_A.weight") for tensor in adapter if tensor.endswith("lora_A.weight")):
        a, b = (adapter[f"{prefix}.lora_{matrix}.weight"].double() for matrix in "AB")
        tensor = f"{prefix.removeprefix('base_model.model.')}.weight"
        expected = base[tensor].bfloat16().double() + 16 / 3 * b @ a
        if name == "dora-bf16":
            lengths = expected.norm(dim=1).bfloat16().double()
            expected *= (adapter[f"{prefix}.lora_magnitude_vector"].double() / lengths)[:, None]
        # Half a unit of the last of 8 bits; sums in float32 may end just beside.
        assert torch.all((merged[tensor].double() - expected).abs() <= 1.001 * 2**-8 * expected.abs() + 1e-7), tensor


@pytest.mark.parametrize("name", ONE)
def test_rows_of_projections_without_an_adapter_have_no_gradient(inside: Inside, name: str) -> None:
    assert inside.results[name]["other_gradient"] == 0


@pytest.mark.parametrize("name", [*ONE, *BFLOAT16])
def test_adapters_that_are_read_back_compute_the_same(inside: Inside, name: str) -> None:
    assert inside.results[name]["equal_when_read_back"]


@pytest.mark.parametrize("name", ONE)
def test_layers_that_are_computed_again_give_adapters_the_same_gradients(inside: Inside, name: str) -> None:
    assert inside.results[name]["recomputed_equal"]


@pytest.mark.parametrize("name", [*ONE, "own-layout"])
def test_a_hundred_switches_leave_the_frozen_weights_and_the_engine_right(inside: Inside, name: str) -> None:
    assert inside.results[name]["base_is_unchanged"]
    assert len(inside.results[name]["probes"]) == 2 and max(inside.results[name]["probes"]) <= 1e-5


def test_adapted_matrices_alone_are_copied_and_only_into_another_layout(inside: Inside) -> None:
    assert inside.results["lora"]["bytes_copied"] == 0
    copied = inside.results["own-layout"]
    assert copied["bytes_copied"] == copied["adapted_bytes"] > 0
    assert all(inside.results[name]["stream_is_merged"] for name in ONE)


def test_adapters_take_at_most_half_of_what_full_training_takes(inside: Inside) -> None:
    """Optimizer, gradients and reference; of rank 3 on a hidden size of 32, which is much."""
    lora, full = (inside.results[name]["bytes"] for name in ("lora", "full"))
    ratio = sum(lora.values()) / sum(full.values())
    print(f"\nadapters {lora}, full training {full}: ratio {ratio:.3f}")
    assert lora["reference"] == 0 and full["reference"] > 0
    assert ratio <= 0.5


@pytest.mark.parametrize("name", ONE)
def test_the_merged_export_is_the_documented_product_of_the_adapter_file(inside: Inside, name: str) -> None:
    """W + alpha / rank · B · A in float64, for DoRA with rows of the given lengths."""
    base = load_file(inside.base / "model.safetensors")
    merged = load_file(inside.folder / name / "merged" / "model.safetensors")
    adapter = load_file(inside.folder / name / "adapter" / "adapter_model.safetensors")
    assert sum(tensor.endswith("lora_A.weight") for tensor in adapter) == 2 * (3 if name == "dora-some" else 7)
    for tensor, weight in base.items():
        prefix = f"base_model.model.{tensor.removesuffix('.weight')}"
        if f"{prefix}.lora_A.weight" not in adapter:
            assert torch.equal(merged[tensor], weight), tensor
            continue
        a, b = (adapter[f"{prefix}.lora_{matrix}.weight"].double() for matrix in "AB")
        expected = weight.double() + 16 / 3 * b @ a
        if name.startswith("dora"):
            lengths = adapter[f"{prefix}.lora_magnitude_vector"].double()
            expected *= (lengths / expected.norm(dim=1))[:, None]
        assert float((merged[tensor] - expected).abs().max()) <= 1e-6, tensor


@pytest.mark.parametrize("name", ONE)
def test_peft_computes_the_same_log_probs(inside: Inside, name: str) -> None:
    peft = pytest.importorskip("peft")
    import transformers

    ours = load_file(inside.folder / name / "forward.safetensors")
    base = transformers.AutoModelForCausalLM.from_pretrained(inside.base, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, inside.folder / name / "adapter")
    with torch.no_grad():
        theirs = model(ours["tokens"]).logits.log_softmax(-1)
    assert float((ours["log_probs"][..., : theirs.shape[-1]] - theirs).abs().max()) <= 1e-5


def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit_and_other_adapters_are_refused(tmp_path: Path) -> None:
    words: list[object] = [write_run_experiment(tmp_path), "trainer.total_steps=4", "trainer.save_freq=2"]
    words += ["model.lora.rank=4", "critic.lora.rank=4", "model.lora.type=dora", "model.lora.dropout=0.1"]
    words += ["trainer.export_hf=true"]
    run = tmp_path / "run"
    succeed("train", *words)
    through = learning(run, after=2), load_file(run / "hf" / "latest" / "adapter_model.safetensors")
    resumed = f"trainer.resume={run / 'checkpoints' / 'step-000002'}"
    refused = megappo("train", *words, resumed, "model.lora.rank=2")
    assert refused.code == 2 and "its actor was trained with model.lora" in refused.err
    succeed("train", *words, resumed)
    adapter = load_file(run / "hf" / "latest" / "adapter_model.safetensors")
    assert learning(run, after=2) == through[0]
    assert all(torch.equal(tensor, through[1][name]) for name, tensor in adapter.items())
    succeed("convert", "--from", run / "checkpoints" / "latest", "--to", tmp_path / "adapter", "--tp", 2)
    converted = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(torch.equal(tensor, converted[name]) for name, tensor in adapter.items())
