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
# The balance of experts over the tokens of a whole minibatch, whatever ranks and micro-batches have them.
BALANCE = "model.moe.aux_loss_coeff=0.1,model.moe.z_loss_coeff=0.05"
# Micro-batches of one packed sequence are the same on any layout, and so is what is over in them.
CAPACITY = (
    "model.moe.capacity_factor=0.6,model.use_remove_padding=true,actor.ppo_micro_batch_size_per_gpu=1,"
    "actor.log_prob_micro_batch_size_per_gpu=1,ref.log_prob_micro_batch_size_per_gpu=1,"
    "critic.ppo_micro_batch_size_per_gpu=1,critic.forward_micro_batch_size_per_gpu=1"
)
ONE_RANK = {
    "one": "",
    "sequential": "model.experts=sequential",
    "balance": BALANCE,
    "capacity": CAPACITY,
    "capacity-position": f"{CAPACITY},model.moe.token_drop_policy=position",
}
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
    "ep2-balance": f"layout.ep=2,{BALANCE}",
    "ep2-capacity": f"layout.ep=2,{CAPACITY}",
}
BROKEN = {"tp2-sp+expert-copies": SP}
FOUR_RANKS = {
    "tp2-sp-dp2-ep2": f"{SP},layout.ep=2",
    "tp2-sp-dp2-ep2-etp2": f"{SP},layout.ep=2,layout.etp=2",
    "pp2-ep2": "layout.pp=2,layout.ep=2",
}
SLOW_TWO_RANKS = {"tp2-sp-etp2-allgather": f"{SP},layout.etp=2,model.moe.dispatcher=allgather"}
SLOW_FOUR_RANKS = {
    "tp2-sp-dp2-ep2-etp2-balance": f"{SP},layout.ep=2,layout.etp=2,{BALANCE}",
    "pp2-ep2-balance": f"layout.pp=2,layout.ep=2,{BALANCE}",
    "tp4-sp-ep2-etp2-allgather": (
        "layout.tp=4,layout.sequence_parallel=true,layout.ep=2,layout.etp=2,model.moe.dispatcher=allgather"
    ),
}
SLOW_LAYOUTS = [*SLOW_TWO_RANKS, *SLOW_FOUR_RANKS]
LAYOUTS = ["sequential", *TWO_RANKS, *FOUR_RANKS]


def plain(name: str) -> str:
    """The run on one rank that a layout is compared with."""
    return next((kind for kind in ("balance", "capacity") if name.endswith(kind)), "one")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("parity")
    return parity_runs(folder, **expert_models(folder), layouts={1: ONE_RANK, 2: TWO_RANKS | BROKEN, 4: FOUR_RANKS})


@pytest.fixture(scope="module")
def slow_runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("parity")
    layouts = {1: {name: ONE_RANK[name] for name in ("one", "balance")}, 2: SLOW_TWO_RANKS, 4: SLOW_FOUR_RANKS}
    return parity_runs(folder, **expert_models(folder), layouts=layouts)


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_before_the_first_step_equal_one_rank(runs: Runs, name: str, role: str) -> None:
    worst = runs.gradients(name, role, plain(name))
    assert worst.relative <= GRADIENT_LIMIT, worst


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_and_gradient_norms_of_all_steps_equal_one_rank(runs: Runs, name: str) -> None:
    assert runs.losses(name, plain(name)) <= LOSS_LIMIT
    assert runs.gradient_norms(name, plain(name)) <= LOSS_LIMIT


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_after_three_steps_moved_as_on_one_rank(runs: Runs, name: str, role: str) -> None:
    worst = runs.changes(name, role, plain(name))
    assert worst.relative <= WEIGHT_LIMIT, worst


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_LAYOUTS)
def test_whole_steps_of_more_layouts_equal_one_rank(slow_runs: Runs, name: str) -> None:
    for role in ("actor", "critic"):
        gradients = slow_runs.gradients(name, role, plain(name))
        changes = slow_runs.changes(name, role, plain(name))
        assert gradients.relative <= GRADIENT_LIMIT, (role, gradients)
        assert changes.relative <= WEIGHT_LIMIT, (role, changes)
    assert slow_runs.losses(name, plain(name)) <= LOSS_LIMIT
    assert slow_runs.gradient_norms(name, plain(name)) <= LOSS_LIMIT
    if plain(name) == "balance":
        assert_same_router_losses(slow_runs, name)


def test_the_routers_losses_are_those_of_one_rank_and_count(runs: Runs) -> None:
    assert_same_router_losses(runs, "ep2-balance")
    for role in ("actor", "critic"):
        worst = runs.gradients("balance", role)
        assert worst.relative > 0.01, "the routers' losses change gradients"


def assert_same_router_losses(runs: Runs, name: str) -> None:
    for ours, one in zip(runs.metrics[name], runs.metrics["balance"], strict=True):
        for key in ("actor/router_aux_loss", "actor/router_z_loss", "actor/router_max_load"):
            assert ours[key] == pytest.approx(one[key], rel=1e-5), (ours["step"], key)


def test_tokens_over_the_capacity_are_dropped_alike_and_change_the_step(runs: Runs) -> None:
    """An expert takes ⌈0.6 · tokens · 2 / 4⌉ of a sequence, so that 40% or more are dropped but for rounding up."""
    names = ("ep2-capacity", "capacity", "capacity-position")
    for ours, one, other in zip(*(runs.metrics[name] for name in names), strict=True):
        dropped = one["actor/router_dropped"]
        assert 0.3 < dropped < 0.7 and ours["actor/router_dropped"] == pytest.approx(dropped, abs=1e-9)
        assert 0.3 < other["actor/router_dropped"] < 0.7
    for name, reference in (("capacity", "one"), ("capacity-position", "capacity")):
        assert runs.gradients(name, "actor", reference).relative > 0.01
    assert all(line["actor/router_dropped"] == 0 for line in runs.metrics["one"])


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
