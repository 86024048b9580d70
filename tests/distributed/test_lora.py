"""Low-rank adapters: every layout makes the one-rank steps."""

import pytest

from tests.support.parity import Runs, largest_difference, read_folder, run_layouts, write_experiment
from tests.support.tiny_models import tiny_model, tiny_tokenizer

GRADIENT_LIMIT = 1e-5
LOSS_LIMIT = 1e-5
LORA = "model.lora.rank=3,critic.lora.rank=3"
DORA = f"{LORA},model.lora.type=dora,critic.lora.type=dora"
ATTENTION = "model.lora.rank=3,model.lora.target_modules=[*.self_attn.*]"
ONE_RANK = {"one": LORA, "one-dora": DORA, "one-full": ""}
TWO_RANKS = {
    "tp2": f"{LORA},layout.tp=2",
    "tp2-sp": f"{LORA},layout.tp=2,layout.sequence_parallel=true",
    "pp2": f"{LORA},layout.pp=2",
    "dp2": LORA,
    "tp2-dora": f"{DORA},layout.tp=2",
    "tp2-sp-dora": f"{DORA},layout.tp=2,layout.sequence_parallel=true",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("lora")
    # One KV head on two ranks: a rank's share of the fused rows ends inside a head. Biases: DoRA leaves them out.
    actor = tiny_tokenizer(tiny_model(folder / "actor", "qwen2", num_kv_heads=1, tied=True))
    critic = tiny_tokenizer(tiny_model(folder / "critic", "qwen2", num_kv_heads=1, tied=True, value_head=True, seed=1))
    config = write_experiment(folder, actor, critic)
    metrics = run_layouts(folder, config, 1, ONE_RANK) | run_layouts(folder, config, 2, TWO_RANKS)
    return Runs(folder, {"actor": actor, "critic": critic}, metrics)


def one_rank(name: str) -> str:
    return "one-dora" if name.endswith("dora") else "one"


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


def test_every_adapter_has_a_gradient_and_so_has_the_value_head(runs: Runs) -> None:
    for run, per_projection in (("one", 2), ("one-dora", 3)):
        actor = read_folder(runs.folder / run / "actor-gradients")
        critic = read_folder(runs.folder / run / "critic-gradients")
        assert len(actor) == 2 * 7 * per_projection
        assert critic.keys() == actor.keys() | {"base_model.model.score.weight"}
        assert all(float(tensor.norm()) > 0 for tensor in [*actor.values(), *critic.values()])


def test_the_reference_is_the_actor_without_its_adapters(runs: Runs) -> None:
    """Its KL is that of random adapters to the start, not 0 as it would be to itself."""
    first = runs.metrics["one"][0]
    assert abs(first["kl/mean"]) > 1e-3
