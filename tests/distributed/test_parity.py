"""Every layout makes the one-rank optimizer steps: gradients, losses and weights of three PPO steps, in float32."""

import pytest

from tests.support.parity import Runs, parity_runs, read_folder
from tests.support.tiny_models import VARIED_SETTINGS, tiny_model, tiny_tokenizer

GRADIENT_LIMIT = 1e-5
LOSS_LIMIT = 1e-5
WEIGHT_LIMIT = 1e-3
PLAIN_OPTIMIZER = "actor.optim.use_distributed_optimizer=false,critic.optim.use_distributed_optimizer=false"
FULL = "model.recompute_granularity=full"
SELECTIVE = "model.recompute_granularity=selective,model.recompute_modules=[core_attn,layernorm,mlp]"
PACKED = "model.use_remove_padding=true"
# The longest sequence has 33 tokens: one or two of them in a micro-batch of the actor, several short ones.
DYNAMIC = (
    f"{PACKED},actor.use_dynamic_bsz=true,actor.ppo_micro_batch_size_per_gpu=null,actor.ppo_max_token_len_per_gpu=60,"
    "actor.log_prob_max_token_len_per_gpu=150,critic.ppo_max_token_len_per_gpu=100"
)
ONE_RANK = {
    "one": "",
    "packed": PACKED,
    "micro-1": "actor.ppo_micro_batch_size_per_gpu=1,critic.ppo_micro_batch_size_per_gpu=1",
    "micro-4": "actor.ppo_micro_batch_size_per_gpu=4,critic.ppo_micro_batch_size_per_gpu=4",
    "recompute-uniform": f"{FULL},model.recompute_method=uniform,model.recompute_num_layers=2",
}
TWO_RANKS = {
    "dp2": "",
    "dp2-plain-optimizer": PLAIN_OPTIMIZER,
    "tp2": "layout.tp=2",
    "tp2-sp": "layout.tp=2,layout.sequence_parallel=true",
    "pp2": "layout.pp=2",
    "tp2-sp-recompute-modules": f"layout.tp=2,layout.sequence_parallel=true,{SELECTIVE}",
    "pp2-recompute-block": f"layout.pp=2,{FULL},model.recompute_method=block,model.recompute_num_layers=1",
    "tp2-sp-dynamic": f"layout.tp=2,layout.sequence_parallel=true,{DYNAMIC}",
    "cp2": "layout.cp=2",
    "cp2-a2a": "layout.cp=2,model.cp_comm_type=a2a",
    "cp2-packed": f"layout.cp=2,{PACKED}",
}
FOUR_RANKS = {
    "tp2-pp2": "layout.tp=2,layout.pp=2",
    "tp2-sp-dp2": "layout.tp=2,layout.sequence_parallel=true",
    "pp2-dp2-dynamic": f"layout.pp=2,{DYNAMIC}",
    "cp2-tp2-sp": "layout.cp=2,layout.tp=2,layout.sequence_parallel=true",
}
BROKEN = {"tp2+sp-norm": TWO_RANKS["tp2-sp"], "pp2+tied-embedding": TWO_RANKS["pp2"]}
LAYOUTS = [*list(ONE_RANK)[1:], *TWO_RANKS, *FOUR_RANKS]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("parity")
    # Tied: a pipeline has two copies of the embedding. A value head: the critic's body has a gradient at once.
    actor = tiny_tokenizer(tiny_model(folder / "actor", "qwen3", tied=True, num_layers=2))
    # Of a family with a window, soft caps, and norms and scales of its own, all of which have gradients.
    critic = tiny_tokenizer(
        tiny_model(folder / "critic", "gemma2", num_layers=2, value_head=True, seed=1, **VARIED_SETTINGS["gemma2"])
    )
    return parity_runs(folder, actor, critic, {1: ONE_RANK, 2: TWO_RANKS | BROKEN, 4: FOUR_RANKS})


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_before_the_first_step_equal_one_rank(runs: Runs, name: str, role: str) -> None:
    worst = runs.gradients(name, role)
    assert worst.relative <= GRADIENT_LIMIT, worst


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_of_all_steps_equal_one_rank(runs: Runs, name: str) -> None:
    assert runs.losses(name) <= LOSS_LIMIT


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_after_three_steps_moved_as_on_one_rank(runs: Runs, name: str, role: str) -> None:
    worst = runs.changes(name, role)
    assert worst.relative <= WEIGHT_LIMIT, worst


def test_a_dropped_reduction_of_norm_weights_under_sequence_parallelism_is_seen(runs: Runs) -> None:
    worst = runs.gradients("tp2+sp-norm", "actor")
    assert worst.relative > 0.1 and "norm" in worst.tensor
    assert runs.changes("tp2+sp-norm", "actor").relative > 100 * WEIGHT_LIMIT


def test_a_dropped_reduction_of_the_tied_embedding_over_stages_is_seen(runs: Runs) -> None:
    worst = runs.gradients("pp2+tied-embedding", "actor")
    assert worst.relative > 0.1 and worst.tensor == "model.embed_tokens.weight"
    assert runs.changes("pp2+tied-embedding", "actor").relative > 100 * WEIGHT_LIMIT


def test_gradients_are_not_trivially_zero(runs: Runs) -> None:
    for role in ("actor", "critic"):
        norms = {
            name: float(tensor.norm())
            for name, tensor in read_folder(runs.folder / "one" / f"{role}-gradients").items()
        }
        assert min(norms.values()) > 0, min(norms, key=norms.__getitem__)
