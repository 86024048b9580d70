"""Every layout makes the one-rank optimizer steps: gradients, losses and weights of three PPO steps, in float32."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.parity import OVERLAP, Runs, parity_runs, read_folder
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
CUT = "actor.fsdp.enable=true,critic.fsdp.enable=true,ref.fsdp.enable=true"
LEAN_CUT = f"{CUT},actor.fsdp.reduce_each_micro_batch=false,actor.fsdp.forward_prefetch=true"
LEAN_CUT += f",critic.fsdp.reshard_after_forward=false,{FULL},model.recompute_method=uniform"
ONE_RANK = {
    "one": "",
    "packed": PACKED,
    "micro-1": "actor.ppo_micro_batch_size_per_gpu=1,critic.ppo_micro_batch_size_per_gpu=1",
    "micro-4": "actor.ppo_micro_batch_size_per_gpu=4,critic.ppo_micro_batch_size_per_gpu=4",
    "recompute-uniform": f"{FULL},model.recompute_method=uniform,model.recompute_num_layers=2",
}
VIRTUAL = "layout.pp=2,layout.vpp=2"
# Passes of three micro-batches, and of one, which the interleaved schedule fills up to a multiple of pp.
ODD = (
    "actor.log_prob_micro_batch_size_per_gpu=6,ref.log_prob_micro_batch_size_per_gpu=16,"
    "critic.forward_micro_batch_size_per_gpu=6"
)
TWO_RANKS = {
    "dp2": "",
    "dp2-plain-optimizer": PLAIN_OPTIMIZER,
    "dp2-overlap": OVERLAP,
    "tp2": "layout.tp=2",
    "tp2-sp": "layout.tp=2,layout.sequence_parallel=true",
    "pp2": "layout.pp=2",
    "tp2-sp-recompute-modules": f"layout.tp=2,layout.sequence_parallel=true,{SELECTIVE}",
    "pp2-recompute-block": f"layout.pp=2,{FULL},model.recompute_method=block,model.recompute_num_layers=1",
    "dp2-fsdp": CUT,
    "dp2-fsdp-options": f"{LEAN_CUT},model.recompute_num_layers=2",
    "tp2-sp-dynamic": f"layout.tp=2,layout.sequence_parallel=true,{DYNAMIC}",
    "pp2-vpp2+threes": f"{VIRTUAL},{ODD}",
    "cp2": "layout.cp=2",
    "cp2-a2a": "layout.cp=2,model.cp_comm_type=a2a",
    "cp2-packed": f"layout.cp=2,{PACKED}",
}
FOUR_RANKS = {
    "tp2-pp2": "layout.tp=2,layout.pp=2",
    "tp2-sp-dp2": "layout.tp=2,layout.sequence_parallel=true",
    "tp2-sp-dp2-fsdp": f"layout.tp=2,layout.sequence_parallel=true,{CUT}",
    "pp2-dp2-dynamic": f"layout.pp=2,{DYNAMIC}",
    # The longer rank's sequences need two or three micro-batches of the actor's, and three of the critic's.
    "pp2-vpp2-dp2-dynamic": (
        f"{VIRTUAL},{DYNAMIC},actor.ppo_max_token_len_per_gpu=45,critic.ppo_max_token_len_per_gpu=80"
    ),
    "cp2-tp2-sp": "layout.cp=2,layout.tp=2,layout.sequence_parallel=true",
}
EIGHT_RANKS = {"tp2-pp2-dp2": "layout.tp=2,layout.pp=2"}
# Of three layers, which two stages can't share equally: one and two, two and one.
UNEQUAL_STAGES = {
    "pp2-last": "layout.pp=2,layout.num_layers_in_last_pipeline_stage=2",
    "pp2-embedding": "layout.pp=2,layout.account_for_embedding_in_pipeline_split=true",
    "pp2-output": "layout.pp=2,layout.account_for_loss_in_pipeline_split=true",
}
BROKEN = {"tp2+sp-norm": TWO_RANKS["tp2-sp"], "pp2+tied-embedding": VIRTUAL}
LAYOUTS = [*list(ONE_RANK)[1:], *TWO_RANKS, *FOUR_RANKS]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return of_models(tmp_path_factory.mktemp("parity"), 4, {1: ONE_RANK, 2: TWO_RANKS | BROKEN, 4: FOUR_RANKS})


@pytest.fixture(scope="module")
def slow_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Runs]:
    """By the run's name."""
    one, found = {"one": ""}, {}
    for num_layers, num_ranks, named in ((4, 8, EIGHT_RANKS), (3, 2, UNEQUAL_STAGES)):
        runs = of_models(tmp_path_factory.mktemp("parity"), num_layers, {1: one, num_ranks: named})
        found |= dict.fromkeys(named, runs)
    return found


def of_models(folder: Path, num_layers: int, layouts: Mapping[int, Mapping[str, str]]) -> Runs:
    # Tied: a pipeline has two copies of the embedding. A value head: the critic's body has a gradient at once.
    actor = tiny_tokenizer(tiny_model(folder / "actor", "qwen3", tied=True, num_layers=num_layers))
    # Of a family with a window, soft caps, and norms and scales of its own, all of which have gradients.
    settings = VARIED_SETTINGS["gemma2"]
    critic = tiny_model(folder / "critic", "gemma2", num_layers=num_layers, value_head=True, seed=1, **settings)
    return parity_runs(folder, actor, tiny_tokenizer(critic), layouts)


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


@pytest.mark.slow
@pytest.mark.parametrize("name", [*EIGHT_RANKS, *UNEQUAL_STAGES])
def test_all_three_dimensions_and_unequal_stages_make_the_one_rank_steps(slow_runs: dict[str, Runs], name: str) -> None:
    runs = slow_runs[name]
    for role in ("actor", "critic"):
        gradients, changes = runs.gradients(name, role), runs.changes(name, role)
        assert gradients.relative <= GRADIENT_LIMIT, gradients
        assert changes.relative <= WEIGHT_LIMIT, changes
    assert runs.losses(name) <= LOSS_LIMIT


def test_a_dropped_reduction_of_norm_weights_under_sequence_parallelism_is_seen(runs: Runs) -> None:
    worst = runs.gradients("tp2+sp-norm", "actor")
    assert worst.relative > 0.1 and "norm" in worst.tensor
    assert runs.changes("tp2+sp-norm", "actor").relative > 100 * WEIGHT_LIMIT


def test_a_dropped_reduction_of_the_tied_embedding_over_stages_is_seen(runs: Runs) -> None:
    worst = runs.gradients("pp2+tied-embedding", "actor")
    assert worst.relative > 0.1 and worst.tensor == "model.embed_tokens.weight"
    assert runs.changes("pp2+tied-embedding", "actor").relative > 100 * WEIGHT_LIMIT


def test_virtual_stages_have_an_even_number_of_micro_batches(runs: Runs) -> None:
    """Those by tokens are cut smaller, a mean of two and four in steps with both; in sequences they are filled up."""
    by_tokens = runs.metrics["pp2-vpp2-dp2-dynamic"]
    assert [line["actor/micro_batches"] for line in by_tokens] == [3, 2, 3]
    assert [line["critic/micro_batches"] for line in by_tokens] == [4, 4, 4]
    assert [line["actor/micro_batches"] for line in runs.metrics["pp2-vpp2+threes"]] == [3, 3, 3]


def test_gradients_are_not_trivially_zero(runs: Runs) -> None:
    for role in ("actor", "critic"):
        norms = {
            name: float(tensor.norm())
            for name, tensor in read_folder(runs.folder / "one" / f"{role}-gradients").items()
        }
        assert min(norms.values()) > 0, min(norms, key=norms.__getitem__)
