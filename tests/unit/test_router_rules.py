"""What may be asked of routers: each refusal with its way out; and their losses against hand arithmetic."""
# ruff: noqa: E501  a line of a table is one case, with the whole message

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megappo.config.checks_experts import expert_problems
from megappo.config.load import load_experiment
from megappo.engines.routing import RoutingStatistics, loads_of
from megappo.errors import DataError
from megappo.models.families.base import MoeShape
from megappo.models.hf_folder import SafetensorsReader
from megappo.models.import_hf import _refuse_unknown
from megappo.models.router import MicroRouting, Routing
from megappo.models.routing import best_experts, expert_weights
from megappo.models.weight_map import WeightMap
from tests.support.experiments import MODEL, write_experiment

EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 6}
REPLAY, GATHER = "actor.router_replay=rollout", "model.moe.dispatcher=allgather"


def found(folder: Path, *overrides: str, **model: object) -> list[str]:
    config = load_experiment(write_experiment(folder, **model), overrides)
    return [problem.text() for problem in expert_problems(config)]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([REPLAY, "replay.size=8"], "without recorded experts"),
        ([REPLAY, "trainer.kind=sft"], "trainer.kind sft has none"),
        (["actor.router_replay=old_log_probs", "algorithm.rollout_correction.bypass_mode=true"], "leaves out the old log-prob pass"),
        ([GATHER, "layout.ep=2"], "the ep 2 · etp 1 = 2 ranks that share experts would have to hold the same number of tokens"),
        ([GATHER, "layout.pp=2"], "over layout.pp 2 stages"),
        (["model.moe.token_drop_policy=position"], "does nothing, for model.moe.capacity_factor is null"),
    ],
)  # fmt: skip
def test_each_rule(tmp_path: Path, overrides: list[str], expected: str) -> None:
    lines = found(tmp_path, *overrides, **EXPERTS)
    assert len(lines) == 1, lines
    assert expected in lines[0]


def test_generation_with_latent_attention(tmp_path: Path) -> None:
    latent = {"model_type": "deepseek_v3", "n_routed_experts": 8, "moe_intermediate_size": 6, "num_key_value_heads": 12}
    assert found(tmp_path, **latent) == []
    for weights in ("auto", "direct", "load"):
        assert found(tmp_path, "rollout.engine=vllm", f"hybrid.weights={weights}", **latent) == []


def test_what_is_allowed(tmp_path: Path) -> None:
    assert (
        found(tmp_path, REPLAY, GATHER, "layout.tp=2", "layout.ep=2", "layout.sequence_parallel=true", **EXPERTS) == []
    )
    assert found(tmp_path, REPLAY, "algorithm.rollout_correction.bypass_mode=true", **EXPERTS) == []
    for engine in ("native", "vllm"):
        assert found(tmp_path, REPLAY, f"rollout.engine={engine}", "rollout.multi_turn.enable=true", **EXPERTS) == []


def test_a_critic_with_experts_beside_a_dense_actor(tmp_path: Path) -> None:
    """The routers' losses, dispatcher and capacity are the critic's too; what is replayed is the actor's alone."""
    critic = tmp_path / "critic"
    critic.mkdir()
    (critic / "config.json").write_text(json.dumps(MODEL | EXPERTS))
    settings = ["model.moe.aux_loss_coeff=0.1", "model.moe.capacity_factor=1.5", f"critic.path={critic}"]
    assert found(tmp_path, *settings) == []
    assert "over layout.pp 2 stages" in found(tmp_path, *settings, GATHER, "layout.pp=2")[0]
    (line,) = found(tmp_path, *settings, REPLAY)
    assert line.startswith("actor.router_replay: ") and line.endswith("is dense; leave it out, or set it to off")
    lines = found(tmp_path, *settings, "algorithm.adv_estimator=grpo")  # which has no critic
    assert [line.rpartition("; ")[2] for line in lines] == [
        "leave it out, or set it to 0.0", "leave it out, or set it to null"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "setting",
    [REPLAY, GATHER, "model.experts=sequential", "model.moe.aux_loss_coeff=0.1", "model.moe.z_loss_coeff=0.1"],
)
def test_a_dense_model_has_no_routers(tmp_path: Path, setting: str) -> None:
    (line,) = found(tmp_path, setting)
    assert line.startswith(setting.partition("=")[0]) and "is for models with experts" in line


def test_layers_that_predict_several_tokens_are_refused_by_name(tmp_path: Path) -> None:
    save_file({"model.layers.2.eh_proj.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with SafetensorsReader(tmp_path) as reader, pytest.raises(DataError, match="multi-token prediction layer"):
        _refuse_unknown(reader, WeightMap({}, ()))


def test_a_bias_and_groups_change_the_choice_and_not_the_weights() -> None:
    """Six experts in three groups of two; the sum of a group's two best: 0.9, 1.0, 0.8."""
    moe = MoeShape(
        num_experts=6, top_k=2, ffn_size=4, score="sigmoid", num_groups=3, top_groups=1, best_of_group=2, scaling=2.0,
        norm_topk_prob=True,
    )  # fmt: skip
    scores = torch.tensor([[0.8, 0.1, 0.6, 0.4, 0.5, 0.3]])
    experts = best_experts(moe, scores)
    assert experts.tolist() == [[2, 3]]
    assert expert_weights(moe, scores, experts).tolist() == [pytest.approx([1.2, 0.8])]
    moved = best_experts(moe, scores, torch.tensor([0.0, 0.2, 0.0, 0.0, 0.0, 0.0]))
    assert moved.tolist() == [[0, 1]]
    assert expert_weights(moe, scores, moved).tolist() == [pytest.approx([2 * 8 / 9, 2 / 9])]


def test_metrics_of_a_load_by_hand() -> None:
    """Two layers, 3 experts, 4 tokens that go to one expert each: loads 4 0 0 and 2 1 1."""
    sums = torch.tensor(
        [[4, 0, 0, 2.0, 1.0, 1.0, 8.0, 0, 2], [2, 1, 1, 2.0, 1.0, 1.0, 4.0, 2, 1]], dtype=torch.float64
    )  # fmt: skip
    metrics = RoutingStatistics(sums, num_experts=3, top_k=1).metrics
    # 3/16 · (4 · 2) = 1.5 and 3/16 · (2 · 2 + 1 + 1) = 1.125
    assert metrics == pytest.approx(
        {
            "router_aux_loss": 1.3125,
            "router_z_loss": 1.5,
            "router_max_load": 3.0,
            "router_changed": 0.25,
            "router_dropped": 3 / 8,
        }
    )


def test_loads_of_a_record_leave_out_what_was_not_recorded() -> None:
    experts = torch.tensor([[[0, 1], [2, 1]], [[1, 2], [-1, -1]]], dtype=torch.int16)
    assert loads_of([experts], 3).tolist() == [[1, 2, 1], [0, 1, 1]]


def test_layers_that_run_again_find_their_own_micro_batch() -> None:
    """Two micro-batches forward without gradients, then both again, in order, before their backward."""
    routing = Routing(MoeShape(num_experts=2, top_k=1, ffn_size=4), (0,))
    first, second = (MicroRouting(torch.ones(1, dtype=torch.bool)) for _ in range(2))
    with torch.no_grad():
        for micro in (first, second):
            routing.begin(micro, is_update=True)
            assert routing.current(0) == (micro, False)
    assert routing.current(0)[0] is first
    assert routing.current(0) == (second, True)
    # Without recomputation a layer runs once, with gradients.
    third = MicroRouting(torch.ones(1, dtype=torch.bool))
    routing.begin(third, is_update=True)
    assert routing.current(0)[0] is third
