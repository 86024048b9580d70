"""Settings made apart, in one run: packed batches, recompute, offload, adapters, windows, replayed experts."""

import pytest

from tests.support.parity import Runs, largest_difference, run_layouts, write_experiment
from tests.support.tiny_models import VARIED_SETTINGS, tiny_model, tiny_tokenizer

GRADIENT_LIMIT = 1e-5
LOSS_LIMIT = 1e-5
NO_CRITIC = "algorithm.adv_estimator=grpo"
DYNAMIC = (
    "model.use_remove_padding=true,actor.use_dynamic_bsz=true,actor.ppo_micro_batch_size_per_gpu=null,"
    "actor.ppo_max_token_len_per_gpu=60"
)
RECOMPUTE = "model.recompute_granularity=full,model.recompute_method=uniform,model.recompute_num_layers=1"
OFFLOAD = (
    "actor.offload.params=true,actor.offload.grads=true,actor.offload.optimizer=true,ref.offload.params=true"
)  # fmt: skip
LEAN = f"{DYNAMIC},{RECOMPUTE},{OFFLOAD}"
LORA = "model.lora.rank=3"
ROUTERS = "actor.router_replay=old_log_probs,model.moe.aux_loss_coeff=0.1"
ONE_RANK = {
    "gemma2": f"model.path={{gemma2}},{NO_CRITIC}",
    "adapters": f"model.path={{gemma2}},{NO_CRITIC},{LORA}",
    "experts": f"model.path={{moe}},{NO_CRITIC},{ROUTERS}",
    "expert_adapters": f"model.path={{moe}},{NO_CRITIC},{LORA}",
    # The reference is the actor without its adapters, and runs inside of the actor's updates.
    "exact_kl": f"model.path={{moe}},{NO_CRITIC},{LORA},{ROUTERS},actor.kl_loss_type=full",
}
TWO_RANKS = {
    "gemma2-tp2": f"{ONE_RANK['gemma2']},layout.tp=2,layout.sequence_parallel=true,{LEAN}",
    "adapters-dp2": f"{ONE_RANK['adapters']},{LEAN}",
    "adapters-pp2": f"{ONE_RANK['adapters']},layout.pp=2,{LEAN}",
    "experts-ep2": f"{ONE_RANK['experts']},layout.ep=2,{LEAN}",
    "expert_adapters-ep2": f"{ONE_RANK['expert_adapters']},layout.ep=2,{LEAN}",
    "exact_kl-ep2": f"{ONE_RANK['exact_kl']},layout.ep=2,{LEAN}",
    "exact_kl-pp2": f"{ONE_RANK['exact_kl']},layout.pp=2,{LEAN}",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("together")
    gemma2 = tiny_tokenizer(tiny_model(folder / "gemma2-model", "gemma2", **VARIED_SETTINGS["gemma2"]))
    moe = tiny_tokenizer(tiny_model(folder / "moe-model", "qwen3_moe"))
    config = write_experiment(folder, gemma2, gemma2)
    one, two = (
        {name: words.format(gemma2=gemma2, moe=moe) for name, words in named.items()} for named in (ONE_RANK, TWO_RANKS)
    )
    metrics = run_layouts(folder, config, 1, one) | run_layouts(folder, config, 2, two)
    return Runs(folder, {"actor": gemma2}, metrics)


@pytest.mark.parametrize("name", TWO_RANKS)
def test_gradients_and_steps_equal_one_plain_rank(runs: Runs, name: str) -> None:
    plain = name.partition("-")[0]
    worst = largest_difference(*(runs.folder / run / "actor-gradients" for run in (name, plain)))
    assert worst.relative <= GRADIENT_LIMIT, worst
    assert len(runs.metrics[plain]) == 3
    for ours, one in zip(runs.metrics[name], runs.metrics[plain], strict=True):
        routers = [key for key in one if key.startswith("actor/router_")]
        for key in ("actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/grad_norm", *routers):
            assert abs(ours[key] - one[key]) <= LOSS_LIMIT * max(abs(one[key]), 1.0), (ours["step"], key)
    assert runs.metrics[name][0]["actor/micro_batches"] != runs.metrics[plain][0]["actor/micro_batches"]
    assert any(key.startswith("memory/") and key.endswith("/host") for key in runs.metrics[name][0])
