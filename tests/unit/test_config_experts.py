"""Rules of the layout of experts: each message, and that what is allowed passes."""
# ruff: noqa: E501  a line of a table is one case, with the whole message

import json
from pathlib import Path

import pytest

from megappo.config.checks import check_experiment
from megappo.config.grid import TrainingGrid
from megappo.config.layout import LayoutConfig
from megappo.config.load import load_experiment
from megappo.errors import ConfigError
from megappo.models.fits import refuse_stages_without_experts
from megappo.parallel.mesh import data_parallel_size
from tests.support.experiments import MODEL, write_experiment

EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 6}
SP = "layout.sequence_parallel=true"


def found(folder: Path, *overrides: str, world_size: int | None = None, **model: object) -> list[str]:
    """The errors about the layout, of a model with 8 experts of 6 rows unless told."""
    config = load_experiment(write_experiment(folder, **(EXPERTS | model)), overrides)
    texts = [problem.text() for problem in check_experiment(config, world_size)]
    return [text for text in texts if text.startswith("layout.")]


@pytest.mark.parametrize(
    ("overrides", "world_size", "expected"),
    [
        (["layout.ep=3"], 3, "layout.ep: 3: does not divide the 8 experts of"),
        (["layout.ep=3"], 3, "nearest that can: 2 or 4"),
        (["layout.etp=4"], 4, "layout.etp: 4: does not divide the 6 rows (moe_intermediate_size) of an expert of"),
        (["layout.ep=4"], 2, "layout.ep: 4: times etp 1 does not divide the tp 1 · dp 2 = 2 ranks of a stage; nearest that can: 2"),
        (["layout.ep=4", "layout.dp=6"], None, "layout.ep: 4: times etp 1 does not divide the tp 1 · dp 6 = 6 ranks of a stage; nearest that can: 3 or 6"),
        (["layout.ep=2", "layout.etp=3"], 2, "layout.etp: 3: times ep 2 does not divide the tp 1 · dp 2 = 2 ranks of a stage; nearest that can: 1"),
        (["layout.tp=3"], None, "layout.sequence_parallel: false: "),
    ],
)  # fmt: skip
def test_each_rule(tmp_path: Path, overrides: list[str], world_size: int | None, expected: str) -> None:
    lines = found(tmp_path, *overrides, world_size=world_size)
    assert len(lines) == 1, lines
    assert expected in lines[0]


@pytest.mark.parametrize(
    ("overrides", "world_size"),
    [
        (["layout.ep=2"], 2),
        (["layout.ep=2"], None),  # dp is not known yet
        (["layout.tp=3", SP], 3),
        (["layout.tp=3", SP, "layout.etp=3"], 3),
        (["layout.tp=3", SP, "layout.etp=3", "layout.ep=2"], 6),
        (["layout.pp=2", "layout.ep=2"], 4),
    ],
)
def test_what_is_allowed(tmp_path: Path, overrides: list[str], world_size: int | None) -> None:
    assert found(tmp_path, *overrides, world_size=world_size) == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [(["layout.tp=3", SP, "layout.etp=3"], False), (["layout.etp=3"], True), (["layout.ep=2"], True), ([], False)],
)
def test_experts_that_data_parallel_ranks_share_are_generated_from_elsewhere(
    tmp_path: Path, overrides: list[str], expected: bool
) -> None:
    """Ranks that decode different prompts would wait for each other in every layer."""
    config = load_experiment(write_experiment(tmp_path, **EXPERTS), overrides)
    assert config.generates_in_own_layout is expected


def test_experts_of_a_reward_model_are_laid_out_too(tmp_path: Path) -> None:
    """It has 6 where the actor has 8: what divides the one may not divide the other."""
    judge = tmp_path / "judge"
    judge.mkdir()
    (judge / "config.json").write_text(json.dumps(MODEL | EXPERTS | {"num_experts": 6}))
    parts = f"reward.parts=[{{name: judge, kind: model, path: {judge}}}]"
    assert found(tmp_path, parts, "layout.ep=2") == []
    (line,) = found(tmp_path, parts, "layout.ep=4")
    assert f"layout.ep: 4: does not divide the 6 experts of {judge}; nearest that can: 3 or 6" in line


def test_a_dense_model_has_no_experts_to_lay_out(tmp_path: Path) -> None:
    lines = found(tmp_path, "layout.ep=2", "layout.etp=2", "layout.dp=4", model_type="llama")
    assert [line.split(": is for experts")[0] for line in lines] == ["layout.ep: 2", "layout.etp: 2"]
    assert found(tmp_path, "layout.etp=1", model_type="llama") == []


def test_a_started_world_that_experts_do_not_divide() -> None:
    assert data_parallel_size(LayoutConfig(tp=2, ep=4, etp=2), 8) == 4
    with pytest.raises(
        ConfigError, match=r"layout\.ep: 3 × etp 1 = 3 .* tp 2 × dp 2 .* possible with this etp: 1, 2, 4"
    ):
        data_parallel_size(LayoutConfig(tp=2, ep=3), 4)
    with pytest.raises(ConfigError, match=r"possible with this etp: none, leave layout\.etp out"):
        data_parallel_size(LayoutConfig(etp=3), 4)


def test_stages_that_can_be_trained_all_have_experts() -> None:
    refuse_stages_without_experts(1, 4)
    refuse_stages_without_experts([0, 1, 1, 1], 2)
    with pytest.raises(ConfigError, match=r"layout\.pp: 4 makes stage 0 of layers 0 to 0, none of which has experts"):
        refuse_stages_without_experts([0, 1, 1, 1], 4)


def test_a_rank_of_virtual_stages_has_experts_in_any_of_them() -> None:
    refuse_stages_without_experts([0, 1, 1, 1], 2, virtual=[1, 1, 1, 1])
    with pytest.raises(
        ConfigError, match=r"layout\.vpp: 2 gives pipeline rank 0 layers 0, 2, none of which has experts"
    ):
        refuse_stages_without_experts([0, 1, 0, 1], 2, virtual=[1, 1, 1, 1])


def test_whole_experts_are_the_default_whatever_tp_is() -> None:
    layout = LayoutConfig(tp=4)
    assert (layout.ep, layout.etp, layout.expert_tp) == (1, None, 1)
    # Then each TP rank of a stage holds a copy of every expert.
    grid = TrainingGrid(tp=4, ep=layout.ep, etp=layout.expert_tp)
    assert [grid.expert_dp_rank(rank) for rank in range(4)] == [0, 1, 2, 3]


RATE = "model.moe.bias_update_rate"
LATENT = {"model_type": "deepseek_v3", "n_routed_experts": 8, "moe_intermediate_size": 6}


@pytest.mark.parametrize(
    ("overrides", "model", "expected"),
    [
        ([f"{RATE}=0.001"], {"model_type": "llama"}, "0.001: is for models with experts, and F/model is dense; leave it out, or set it to 0.0"),
        ([f"{RATE}=0.001"], EXPERTS, "0.001: moves biases of routers, which models of deepseek_v3 have, and F/model has none; set it to 0, and model.moe.aux_loss_coeff to balance its experts"),
        ([f"{RATE}=0.001", "model.lora.rank=2"], LATENT, "0.001: the biases belong to the frozen weights, which model.lora.rank 2 leaves as they are; set it to 0, or model.lora.rank to 0"),
        ([f"{RATE}=0.001"], LATENT, None),
        ([f"{RATE}=0.001", "actor.router_replay=rollout"], LATENT, None),
        ([], EXPERTS, None),
    ],
)  # fmt: skip
def test_biases_are_moved_where_there_are_some(
    tmp_path: Path, overrides: list[str], model: dict[str, object], expected: str | None
) -> None:
    config = load_experiment(write_experiment(tmp_path, **model), overrides)
    texts = [problem.text().replace(str(tmp_path), "F") for problem in check_experiment(config)]
    found = [text.removeprefix(f"{RATE}: ") for text in texts if text.startswith(RATE)]
    assert found == ([] if expected is None else [expected])
