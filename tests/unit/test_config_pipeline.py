"""Layers of unequal pipeline stages, and what is said where a model's can't be spread so."""
# ruff: noqa: E501  a line of a table is one case, with the whole message

from pathlib import Path

import pytest

from megappo.config.checks import check_experiment
from megappo.config.load import load_experiment
from megappo.config.pipeline import PipelineSplit
from megappo.errors import ConfigError
from tests.support.experiments import write_experiment


@pytest.mark.parametrize(
    ("split", "num_layers", "pp", "expected"),
    [
        (PipelineSplit(), 6, 3, [2, 2, 2]),
        (PipelineSplit(), 6, 4, None),
        (PipelineSplit(1), 7, 4, [1, 2, 2, 2]),
        (PipelineSplit(None, 1), 7, 4, [2, 2, 2, 1]),
        (PipelineSplit(3, 1), 8, 4, [3, 2, 2, 1]),
        (PipelineSplit(2, 1), 3, 2, [2, 1]),
        (PipelineSplit(2, 2), 3, 2, None),
        (PipelineSplit(6), 6, 2, None),  # no layer for the other stage
        (PipelineSplit(account_for_embedding_in_pipeline_split=True), 7, 4, [1, 2, 2, 2]),
        (PipelineSplit(account_for_loss_in_pipeline_split=True), 7, 4, [2, 2, 2, 1]),
        (PipelineSplit(None, None, True, True), 6, 4, [1, 2, 2, 1]),
        (PipelineSplit(None, None, True, True), 2, 4, None),
        (PipelineSplit(None, None, True, True), 5, 1, [5]),
    ],
)
def test_layers_of_stages(split: PipelineSplit, num_layers: int, pp: int, expected: list[int] | None) -> None:
    assert split.stages(num_layers, pp) == expected


def found(folder: Path, overrides: str) -> list[str]:
    """What is said of a model of 6 layers."""
    config = load_experiment(write_experiment(folder), overrides.split())
    return [problem.text().replace(str(folder), "F") for problem in check_experiment(config)]


FIRST, LAST = "layout.num_layers_in_first_pipeline_stage", "layout.num_layers_in_last_pipeline_stage"
LOSS = "layout.account_for_loss_in_pipeline_split"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (f"{FIRST}=2", f"{FIRST}: 2: is for pipeline stages, and layout.pp is 1; leave it out, or set layout.pp to 2"),
        (f"layout.pp=2 {FIRST}=2 {LOSS}=true", f"{FIRST}: 2: is one way to make stages unequal, and {LOSS} is another; leave one of the two out"),
        (f"layout.pp=3 {FIRST}=3", f"{FIRST}: 3: leaves 3 of the 6 layers of F/model for 2 other stages; nearest that can: 2 or 4"),
        (f"layout.pp=2 {FIRST}=4 {LAST}=1", f"{FIRST}: 4: leaves 1 of the 6 layers of F/model for 0 other stages beside a last one of 1; nearest that can: 5"),
        (f"layout.pp=3 {LAST}=1", f"{LAST}: 1: leaves 5 of the 6 layers of F/model for 2 other stages; nearest that can: 2"),
        (f"layout.pp=2 {LOSS}=true", "layout.pp: 2: does not divide the 6 layers of F/model, counted as 7 with embedding or loss; nearest that can: 1"),
        ("model.recompute_granularity=full model.recompute_method=uniform model.recompute_num_layers=2 layout.pp=3 " + f"{FIRST}=1 {LAST}=3", "model.recompute_num_layers: 2: does not divide the 1 or 2 or 3 layers of a stage of F/model; nearest that can: 1"),
    ],
)  # fmt: skip
def test_each_rule(tmp_path: Path, overrides: str, expected: str) -> None:
    assert found(tmp_path, overrides) == [expected]


@pytest.mark.parametrize(
    ("key", "number"),
    [
        ("virtual_pipeline_model_parallel_size", "the same number"),
        ("num_layers_per_virtual_pipeline_stage", r"layers / \(pp · that number\)"),
    ],
)
def test_other_names_of_virtual_stages_lead_to_theirs(tmp_path: Path, key: str, number: str) -> None:
    with pytest.raises(ConfigError, match=rf"layout\.{key} .*are layout\.vpp here.*; set layout\.vpp to {number}"):
        load_experiment(write_experiment(tmp_path), [f"layout.{key}=2"])


MICRO = "actor.ppo_micro_batch_size_per_gpu"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("layout.vpp=2", "layout.vpp: 2: is for virtual stages of a pipeline, and layout.pp is 1; set it to 1, or layout.pp to 2"),
        ("layout.pp=2 layout.vpp=2", "layout.vpp: 2: times pp 2 makes 4 stages, and the 6 layers of F/model can't be split so; nearest that can: 1 or 3"),
        (f"layout.pp=2 layout.vpp=2 {FIRST}=1", "layout.vpp: 2: times pp 2 makes 4 stages, and the 6 layers of F/model can't be split so as the settings of unequal stages say; nearest that can: 1 or 3"),
        ("layout.pp=4 layout.vpp=2 rollout.n=2", "layout.pp: 4: does not divide the 6 layers of F/model; nearest that can: 3 or 6"),
        (f"layout.pp=2 layout.vpp=3 {MICRO}=2", f"{MICRO}: 2: makes 3 micro-batches of the 6 sequences that a step of the optimizer has on a rank, and layout.vpp 3 needs a multiple of pp 2; nearest that can: 1 or 3"),
        (f"layout.pp=2 layout.vpp=3 trainer.kind=sft {MICRO}=4", f"{MICRO}: 4: makes 3 micro-batches of the 12 sequences that a step of the optimizer has on a rank, and layout.vpp 3 needs a multiple of pp 2; nearest that can: 3 or 6"),
        ("model.recompute_granularity=full model.recompute_method=uniform model.recompute_num_layers=2 layout.pp=2 layout.vpp=3", "model.recompute_num_layers: 2: does not divide the 1 layers of a stage of F/model; nearest that can: 1"),
    ],
)  # fmt: skip
def test_each_rule_of_virtual_stages(tmp_path: Path, overrides: str, expected: str) -> None:
    assert found(tmp_path, overrides) == [expected]


@pytest.mark.parametrize(
    "overrides",
    [
        f"layout.pp=2 {FIRST}=4",
        f"layout.pp=3 {FIRST}=1 {LAST}=3",
        f"layout.pp=2 {LOSS}=true layout.account_for_embedding_in_pipeline_split=true",
        "layout.pp=2 layout.vpp=3",
        f"layout.pp=2 layout.vpp=2 {FIRST}=1 {LAST}=1",
        f"layout.pp=2 layout.vpp=2 {LOSS}=true layout.account_for_embedding_in_pipeline_split=true",
    ],
)
def test_what_is_allowed(tmp_path: Path, overrides: str) -> None:
    assert found(tmp_path, overrides) == []
