"""The experiment files: they load, their batches divide, and each holds only what differs from its parent."""

from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from megappo.config.experiment import ExperimentConfig
from megappo.config.load import load_experiment
from megappo.config.stages import has_stages, read_stages
from megappo.config.yaml_file import read_yaml
from megappo.planner.batch import plan_batches, plan_supervised
from tests.support.ranks import ROOT

FILES = sorted((ROOT / "yaml").glob("*.yaml"))
PARENTS = {(file.parent / base).resolve() for file in FILES if (base := read_yaml(file).values.get("base"))}
EXPERIMENTS = [file for file in FILES if file.resolve() not in PARENTS]


def name_of(file: Path) -> str:
    return file.stem


@pytest.mark.parametrize("file", EXPERIMENTS, ids=name_of)
def test_loads_and_divides(file: Path) -> None:
    stages = [stage.config for stage in read_stages(file).values()] if has_stages(file) else [load_experiment(file)]
    for config in stages:
        if config.trainer.kind == "ppo":
            plan = plan_batches(config, 1)
            assert plan.sequences == config.data.train_batch_size * config.rollout.n
            assert plan.actor.num_minibatches * plan.actor.sequences == plan.sequences
        else:
            assert plan_supervised(config, 1).sequences == config.data.train_batch_size


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_holds_only_what_differs_from_its_parent(file: Path) -> None:
    values = read_yaml(file).values
    base = values.pop("base", None)
    inherited = defaults(ExperimentConfig) | (written_values(file.parent / base) if base else {})
    repeated = {path: value for path, value in leaves(values).items() if path in inherited and inherited[path] == value}
    assert not repeated, f"{file.name} repeats what {base or 'the default'} says"
    for name, stage in values.get("stages", {}).items():
        base = stage.pop("base", None)
        below = (written_values(file.parent / base) if base else {}) | leaves(values)
        repeated = {path: value for path, value in leaves(stage).items() if path in below and below[path] == value}
        assert not repeated, f"{file.name} repeats in stage {name} what its base or the file says"


def test_a_repeated_value_would_be_found() -> None:
    assert defaults(ExperimentConfig)["actor.optim.lr"] == 1e-6
    assert "data.train_batch_size" not in defaults(ExperimentConfig)  # has no default
    assert leaves({"a": {"b": 1, "c": [2]}}) == {"a.b": 1, "a.c": [2]}


def written_values(file: Path) -> dict[str, Any]:
    """The leaves of a file and of its parents, the child's over the parent's."""
    values = read_yaml(file).values
    base = values.pop("base", None)
    return (written_values(file.parent / base) if base else {}) | leaves(values)


def leaves(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} → {"a.b": 1}; lists are values."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def defaults(section: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Default of every setting that has one, as YAML writes it."""
    found: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        nested = section_of(field.annotation)
        if nested is not None:
            found |= defaults(nested, f"{prefix}{name}.")
        elif field.default is not PydanticUndefined:
            found[f"{prefix}{name}"] = list(field.default) if isinstance(field.default, tuple) else field.default
    return found


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a setting is, or may be."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None
