"""Virtual pipeline stages in whole runs: the one-rank numbers, checkpoints for other layouts, exports to the bit.

Their gradients and weights are compared in test_parity.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.parity import Runs, largest_difference, read_folder, run_layouts
from tests.support.parity import write_experiment as write_updates
from tests.support.ranks import run_ranks
from tests.support.runs import learning, succeed, write_run_experiment
from tests.support.tiny_models import VARIED_SETTINGS, tiny_model, tiny_tokenizer

VIRTUAL = "layout.pp=2,layout.vpp=2"
SHORT = "trainer.total_steps=2,data.val_files=[],trainer.test_freq=0"
METRICS = ("actor/pg_loss", "critic/vf_loss", "actor/entropy", "actor/grad_norm", "critic/grad_norm", "kl/mean")


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("virtual")
    tiny_tokenizer(tiny_model(folder / "four", "llama", tied=True, num_layers=4))
    return write_run_experiment(folder)


def test_a_run_learns_as_one_rank_does_and_leaves_the_same_weights_everywhere(experiment: Path, tmp_path: Path) -> None:
    """It samples through the virtual stages itself; one rank reads its checkpoint; and what it exports are the bits."""
    model = experiment.parent / "four"
    words = ["train", experiment, f"model.path={model}", *SHORT.split(","), "trainer.export_hf=true"]
    succeed(*words, f"trainer.run_dir={tmp_path}/one", "trainer.save_last=false")
    succeed(*words, *VIRTUAL.split(","), f"trainer.run_dir={tmp_path}/virtual")
    succeed("convert", "--from", tmp_path / "virtual/checkpoints/latest", "--to", tmp_path / "converted")
    ours, one = learning(tmp_path / "virtual"), learning(tmp_path / "one")
    assert [line["step"] for line in ours] == [1, 2]
    for mine, theirs in zip(ours, one, strict=True):
        assert mine["response_length/mean"] == theirs["response_length/mean"]
        assert mine["rollout/log_prob_diff_max"] <= 1e-5
        for key in METRICS:
            assert mine[key] == pytest.approx(theirs[key], abs=2e-5), key
    exported, converted = read_folder(tmp_path / "virtual/hf/latest"), read_folder(tmp_path / "converted")
    before = read_folder(model)
    assert exported.keys() == converted.keys() == before.keys()
    assert all(torch.equal(exported[name], converted[name]) for name in exported)
    assert not any(torch.equal(exported[name], before[name]) for name in exported)


@pytest.fixture(scope="module")
def whole(experiment: Path) -> dict[str, Any]:
    """Metrics of runs that go on from each other's checkpoints."""
    folder = experiment.parent / "runs"
    moe = tiny_tokenizer(tiny_model(experiment.parent / "experts", "qwen3_moe", num_layers=4))
    common = f"{SHORT},trainer.save_last=false"

    def run(num_ranks: int, **runs: str) -> dict[str, Any]:
        words = [",".join((f"{name}=trainer.run_dir={folder / name}", common, more)) for name, more in runs.items()]
        found = run_ranks(
            "tests.distributed.programs.offload", "--config", experiment, "--runs", *words, nproc=num_ranks
        )
        return {name: result["metrics"] for name, result in found.items()}

    def after(name: str) -> str:
        return f"trainer.resume={folder / name}/checkpoints/step-000001"

    save, own = "trainer.save_freq=1", "rollout.tensor_model_parallel_size"
    dense, experts = f"model.path={experiment.parent / 'four'}", f"model.path={moe}"
    adapters = f"{dense},model.lora.rank=3,critic.lora.rank=2"
    found = run(1, one=f"{dense},{save}", experts=f"{experts},{save}", adapters=f"{adapters},{save}")
    found |= run(
        2, virtual=f"{dense},{VIRTUAL},{save}", experts_virtual=f"{experts},{VIRTUAL},{save}",
        adapters_virtual=f"{adapters},{VIRTUAL},{save}",
        moved=f"{dense},{VIRTUAL},{own}=1", moved_wide=f"{dense},{VIRTUAL},{own}=2",
        to_virtual=f"{dense},{VIRTUAL},{after('one')}", to_stages=f"{dense},layout.pp=2,{after('virtual')}",
        experts_to_virtual=f"{experts},{VIRTUAL},{after('experts')}",
    )  # fmt: skip
    return found | run(
        1, to_one=f"{dense},{after('virtual')}", experts_to_one=f"{experts},{after('experts_virtual')}",
        adapters_to_one=f"{adapters},{after('adapters_virtual')}",
    )  # fmt: skip


OTHERS = ["experts_to_virtual", "experts_to_one", "adapters_to_one"]


def plain(name: str) -> str:
    """The run on one rank, from its beginning."""
    return next((kind for kind in ("experts", "adapters") if name.startswith(kind)), "one")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["virtual", "moved", "moved_wide", "experts_virtual", "adapters_virtual"])
def test_generation_through_virtual_stages_and_from_them(whole: dict[str, Any], name: str) -> None:
    assert whole[name][0]["hybrid/probe_diff_max"] <= 1e-5
    for ours, one in zip(whole[name], whole[plain(name)], strict=True):
        assert ours["response_length/mean"] == one["response_length/mean"]
        assert ours["rollout/log_prob_diff_max"] <= 1e-5
        for key in METRICS:
            assert ours[key] == pytest.approx(one[key], abs=2e-5), key


@pytest.mark.slow
@pytest.mark.parametrize("name", ["to_virtual", "to_stages", "to_one", *OTHERS])
def test_checkpoints_go_on_in_other_layouts(whole: dict[str, Any], name: str) -> None:
    """Weights and optimizer state: the second step is that of the run which was not interrupted."""
    (ours,), one = whole[name], whole[plain(name)][1]
    assert ours["step"] == 2
    for key in METRICS:
        assert ours[key] == pytest.approx(one[key], abs=2e-5), key


NO_CRITIC = "algorithm.adv_estimator=grpo"
LEAN = (
    "model.use_remove_padding=true,actor.use_dynamic_bsz=true,actor.ppo_micro_batch_size_per_gpu=null,"
    "actor.ppo_max_token_len_per_gpu=45,model.recompute_granularity=full,model.recompute_method=uniform,"
    "model.recompute_num_layers=1,actor.offload.params=true,actor.offload.grads=true,actor.offload.optimizer=true"
)
# Of five layers: two, and one in each other stage.
UNEQUAL = f"{VIRTUAL},layout.num_layers_in_first_pipeline_stage=2"
ONE_RANK = {
    "gemma2": f"model.path={{gemma2}},{NO_CRITIC},actor.kl_loss_type=full",
    "adapters": f"model.path={{gemma2}},{NO_CRITIC},model.lora.rank=3",
    "latent": f"model.path={{deepseek}},{NO_CRITIC}",
    "experts": f"model.path={{moe}},{NO_CRITIC},actor.router_replay=old_log_probs,model.moe.aux_loss_coeff=0.1",
    "recorded": f"model.path={{moe}},{NO_CRITIC},actor.router_replay=rollout",
    "native": f"model.path={{moe}},{NO_CRITIC},actor.router_replay=rollout",  # what its own engine records
}
TWO_RANKS = {
    "gemma2-virtual": f"{ONE_RANK['gemma2']},{UNEQUAL},{LEAN}",
    "adapters-virtual": f"{ONE_RANK['adapters']},{UNEQUAL},{LEAN}",
    "latent-virtual": f"{ONE_RANK['latent']},{VIRTUAL},actor.optim.use_distributed_optimizer=false",
    "experts-virtual": f"{ONE_RANK['experts']},{VIRTUAL},{LEAN}",
    "native-virtual": f"{ONE_RANK['native']},{VIRTUAL}",
    "recorded-virtual": f"{ONE_RANK['recorded']},{VIRTUAL},actor.log_prob_micro_batch_size_per_gpu=6",
}
FOUR_RANKS = {
    "gemma2-virtual-tp2-sp": f"{ONE_RANK['gemma2']},{UNEQUAL},layout.tp=2,layout.sequence_parallel=true",
    "experts-virtual-ep2": f"{ONE_RANK['experts']},{VIRTUAL},layout.ep=2,{LEAN}",
}
STILL = {"experts-still": f"model.path={{moe}},{NO_CRITIC},{VIRTUAL},actor.optim.lr=0"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("updates")
    models = {
        "gemma2": tiny_model(folder / "of-gemma2", "gemma2", num_layers=5, **VARIED_SETTINGS["gemma2"]),
        "deepseek": tiny_model(folder / "of-deepseek", "deepseek_v3", num_layers=4),
        "moe": tiny_model(folder / "of-moe", "qwen3_moe", num_layers=4),
    }
    for model in models.values():
        tiny_tokenizer(model)
    config = write_updates(folder, models["gemma2"], models["gemma2"])
    metrics = {}
    for num_ranks, named in ((1, ONE_RANK), (2, TWO_RANKS | STILL), (4, FOUR_RANKS)):
        metrics |= run_layouts(
            folder, config, num_ranks, {name: words.format(**models) for name, words in named.items()}
        )
    return Runs(folder, {"actor": models["moe"]}, metrics)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TWO_RANKS, *FOUR_RANKS])
def test_gradients_and_steps_equal_one_plain_rank(runs: Runs, name: str) -> None:
    plain = name.partition("-")[0]
    worst = largest_difference(*(runs.folder / run / "actor-gradients" for run in (name, plain)))
    assert worst.relative <= 1e-5, worst
    assert len(runs.metrics[plain]) == 3
    for ours, one in zip(runs.metrics[name], runs.metrics[plain], strict=True):
        for key in ("actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/grad_norm", "actor/router_aux_loss"):
            if key in one:
                assert abs(ours[key] - one[key]) <= 1e-5 * max(abs(one[key]), 1.0), (ours["step"], key)


@pytest.mark.slow
def test_experts_are_imported_and_exported_to_the_bit(runs: Runs) -> None:
    """Three steps at rate 0."""
    exported, before = read_folder(runs.folder / "experts-still" / "actor-weights"), read_folder(runs.models["actor"])
    assert exported.keys() == before.keys() and all(torch.equal(exported[name], before[name]) for name in before)
    assert runs.metrics["experts-still"][0]["actor/grad_norm"] > 1e-3
