"""Models with experts make the one-rank optimizer steps on every layout of experts: three PPO steps in float32."""

import pytest

from tests.support.expert_runs import expert_models
from tests.support.parity import OVERLAP, Runs, parity_runs, read_folder

GRADIENT_LIMIT = 1e-5
LOSS_LIMIT = 1e-5
WEIGHT_LIMIT = 1e-3
SP = "layout.tp=2,layout.sequence_parallel=true"
PLAIN_OPTIMIZER = "actor.optim.use_distributed_optimizer=false,critic.optim.use_distributed_optimizer=false"
RECOMPUTE = "model.recompute_granularity=selective,model.recompute_modules=[moe,shared_experts,layernorm]"
DYNAMIC = (
    "model.use_remove_padding=true,actor.use_dynamic_bsz=true,actor.ppo_micro_batch_size_per_gpu=null,"
    "actor.ppo_max_token_len_per_gpu=60,critic.ppo_max_token_len_per_gpu=100"
)
ONE_RANK = {"one": "", "sequential": "model.experts=sequential"}
TWO_RANKS = {
    "dp2": "",
    "pp2": "layout.pp=2",
    "ep2": "layout.ep=2",
    # Micro-batches of different numbers of sequences on the two ranks that share experts.
    "ep2-dynamic": f"layout.ep=2,{DYNAMIC}",
    "ep2-overlap": f"layout.ep=2,{OVERLAP}",
    "ep2-sequential": "layout.ep=2,model.experts=sequential",
    "ep2-plain-optimizer": f"layout.ep=2,{PLAIN_OPTIMIZER}",
    # Whole experts on both TP ranks: copies for experts, shards for everything else.
    "tp2-sp": SP,
    "tp2-sp-ep2": f"{SP},layout.ep=2",
    "tp2-sp-ep2-sequential": f"{SP},layout.ep=2,model.experts=sequential",
    "tp2-sp-etp2": f"{SP},layout.etp=2",
    "ep2-recompute": f"layout.ep=2,{RECOMPUTE}",
}
BROKEN = {"tp2-sp+expert-copies": SP}
FOUR_RANKS = {
    "tp2-sp-dp2-ep2": f"{SP},layout.ep=2",
    "tp2-sp-dp2-ep2-etp2": f"{SP},layout.ep=2,layout.etp=2",
    "pp2-ep2": "layout.pp=2,layout.ep=2",
}
LAYOUTS = ["sequential", *TWO_RANKS, *FOUR_RANKS]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("parity")
    return parity_runs(folder, **expert_models(folder), layouts={1: ONE_RANK, 2: TWO_RANKS | BROKEN, 4: FOUR_RANKS})


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_before_the_first_step_equal_one_rank(runs: Runs, name: str, role: str) -> None:
    worst = runs.gradients(name, role)
    assert worst.relative <= GRADIENT_LIMIT, worst


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_and_gradient_norms_of_all_steps_equal_one_rank(runs: Runs, name: str) -> None:
    assert runs.losses(name) <= LOSS_LIMIT
    assert runs.gradient_norms(name) <= LOSS_LIMIT


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_after_three_steps_moved_as_on_one_rank(runs: Runs, name: str, role: str) -> None:
    worst = runs.changes(name, role)
    assert worst.relative <= WEIGHT_LIMIT, worst


def test_experts_that_learn_from_one_rank_alone_are_seen(runs: Runs) -> None:
    """What Megatron does with copies of experts on TP ranks, unless its groups are told."""
    worst = runs.gradients("tp2-sp+expert-copies", "actor")
    assert worst.relative > 0.1 and ".mlp.experts." in worst.tensor
    assert runs.changes("tp2-sp+expert-copies", "actor").relative > 100 * WEIGHT_LIMIT


def test_gradients_are_not_trivially_zero(runs: Runs) -> None:
    """The critic's last experts get no token of the first minibatch, so that a gradient of zero is compared too."""
    zero = {}
    for role in ("actor", "critic"):
        gradients = read_folder(runs.folder / "one" / f"{role}-gradients")
        zero[role] = [name for name, tensor in gradients.items() if not tensor.any()]
    assert not zero["actor"]
    assert zero["critic"] and all(".mlp.experts.3." in name for name in zero["critic"])
