"""From an experiment file and overrides to the typed tree: `base:` inheritance, `a.b=c`, and all mistakes at once.

The YAML itself is read in `yaml_file.py`, messages are worded in `messages.py`, rules across sections in `checks.py`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megappo.config.experiment import ExperimentConfig
from megappo.config.messages import problems_of, unknown_path
from megappo.config.problem import Problem, raise_errors
from megappo.config.yaml_file import Document, parse_value, read_yaml, write_yaml
from megappo.errors import ConfigError

BASE = "base"
STAGES = "stages"
"""Of a file of several runs: `stages.py`."""
COMMAND_LINE = "command line"


@dataclass(frozen=True)
class LoadedExperiment:
    """A resolved experiment, and where each value was written, for messages about it."""

    config: ExperimentConfig
    locations: dict[str, str]
    built_on: Mapping[str, str] = field(default_factory=dict)
    """Of a stage, the earlier stages whose models it names, and where they export them."""


def load_experiment(path: str | Path, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """The typed experiment of a YAML file and `a.b=c` overrides.

    Raises one ConfigError that names every mistake: YAML path, file and line, value, why not, and a value that can be.
    Rules across sections are not checked here: `checks.check_experiment`.
    """
    return read_experiment(path, overrides).config


def read_experiment(path: str | Path, overrides: Sequence[str] = ()) -> LoadedExperiment:
    """Like `load_experiment`, with the file and line of every value."""
    document = read_with_bases(Path(path))
    if STAGES in document.values:
        names = ", ".join(document.values[STAGES] or ())
        raise ConfigError(f"{path}: has stages ({names}) and is no single experiment; name one with --stage")
    return validated(document, [problem for override in overrides for problem in apply_override(document, override)])


def validated(document: Document, problems: Sequence[Problem] = ()) -> LoadedExperiment:
    """The typed experiment of a document; raises one ConfigError with all its mistakes and the `problems`."""
    config: ExperimentConfig | None = None
    found = list(problems)
    try:
        # JSON mode is strict where YAML is typed: `tp: "2"` and `tp: true` are mistakes, a list is a tuple.
        config = ExperimentConfig.model_validate_json(json.dumps(document.values), strict=True)
    except ValidationError as error:
        found += problems_of(error, ExperimentConfig)
    raise_errors(found, document.locations)
    assert config is not None, "a configuration without problems was validated"
    return LoadedExperiment(config, document.locations)


def to_yaml(config: ExperimentConfig) -> str:
    """The resolved experiment as YAML, every default written out; loading it gives the same configuration."""
    return write_yaml(config.model_dump(mode="json"))


def read_with_bases(path: Path, children: tuple[Path, ...] = ()) -> Document:
    """The file's mapping on top of its base's, and so on up; `children` are the files that led here."""
    document = read_yaml(path)
    base = document.values.pop(BASE, None)
    if base is None:
        return document
    where = document.locations.get(BASE, str(path))
    if not isinstance(base, str):
        raise ConfigError(f"base ({where}): has to be the path of one experiment file, as seen from {path.parent}")
    base_path = path.parent / base
    chain = (*children, path)
    if any(base_path.resolve() == seen.resolve() for seen in chain):
        circle = " → ".join(str(seen) for seen in (*chain, base_path))
        raise ConfigError(f"base: {base} ({where}): the files inherit from each other in a circle: {circle}")
    if not base_path.is_file():
        raise ConfigError(f"base: {base} ({where}): {base_path} does not exist; the path is relative to {path.parent}")
    parent = read_with_bases(base_path, chain)
    merge(parent, document)
    return parent


def merge(parent: Document, child: Document) -> None:
    """Lays the child's values over the parent's: mappings merge, everything else is replaced, lists included."""

    def lay(below: dict[str, Any], above: dict[str, Any], prefix: str) -> None:
        for key, value in above.items():
            path = f"{prefix}{key}"
            if isinstance(value, dict) and isinstance(below.get(key), dict):
                lay(below[key], value, f"{path}.")
            else:
                below[key] = value
                _forget(parent.locations, path)

    lay(parent.values, child.values, "")
    parent.locations.update(child.locations)


def apply_override(document: Document, override: str) -> list[Problem]:
    """Sets one `a.b=c` in the document; a number in the path is the place in a list."""
    path, equals, text = override.partition("=")
    path = path.strip()
    if not equals or not path or any(not part for part in path.split(".")):
        return [Problem(override, None, "an override has the form a.b=c", "for example actor.optim.lr=1e-6")]
    problem = unknown_path(path, ExperimentConfig)
    if problem is not None:
        document.locations[problem.path] = COMMAND_LINE
        return [problem]
    value = parse_value(text, f"override {override!r}")
    *parents, leaf = path.split(".")
    target: Any = document.values
    for part in parents:
        child = _child(target, part)
        if child is None and isinstance(target, dict):
            child = target[part] = {}
        if not isinstance(child, dict | list):
            return [_no_item(path, part, target)]
        target = child
    return _set(document, target, path, leaf, value)


def _child(target: Any, part: str) -> Any:
    if isinstance(target, list):
        return target[int(part)] if part.isdecimal() and int(part) < len(target) else None
    return target.get(part)


def _set(document: Document, target: Any, path: str, leaf: str, value: Any) -> list[Problem]:
    if isinstance(target, list):
        if _child(target, leaf) is None:
            return [_no_item(path, leaf, target)]
        target[int(leaf)] = value
    else:
        target[leaf] = value
    _forget(document.locations, path)
    document.locations[path] = COMMAND_LINE
    return []


def _no_item(path: str, part: str, target: Any) -> Problem:
    if isinstance(target, list) and target:
        return Problem(path, None, f"the list has no item {part}", f"its items are 0 to {len(target) - 1}")
    return Problem(path, None, f"there is no list or section for {part} to be in", "set the one above it as a whole")


def _forget(locations: dict[str, str], path: str) -> None:
    """Drops the places of `path` and all below it: their values were replaced."""
    for known in [known for known in locations if known == path or known.startswith(f"{path}.")]:
        del locations[known]
