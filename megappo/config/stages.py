"""An experiment file of several stages: runs one after another, each with settings of its own.

    stages:
      sft: {base: warm_start.yaml}
      ppo: {model: {path: stage:sft}, trainer: {total_steps: 100}}

A stage's settings lie over the file's, these over those of the stage's `base`. Its run folder is
`trainer.run_dir`/NAME. A string `stage:NAME` stands for the model that the earlier stage NAME exports.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megappo.config.load import (
    BASE,
    STAGES,
    LoadedExperiment,
    apply_override,
    merge,
    read_with_bases,
    validated,
)
from megappo.config.problem import Problem
from megappo.config.yaml_file import Document
from megappo.errors import ConfigError

PREFIX = "stage:"
EXPORTED = Path("hf") / "latest"
"""Where a run leaves its model, as seen from its folder."""


def has_stages(path: str | Path) -> bool:
    """Whether the file is one of several stages. Raises ConfigError where it can't be read."""
    return STAGES in read_with_bases(Path(path)).values


def read_stage(path: str | Path, overrides: Sequence[str], name: str) -> LoadedExperiment:
    """One stage of a file. Raises ConfigError, also where there is no such stage."""
    if not has_stages(path):
        raise ConfigError(f"--stage {name}: {path} has no stages; leave the option out")
    stages = read_stages(path, overrides)
    if name not in stages:
        raise ConfigError(f"--stage {name}: {path} has no such stage; its stages are {', '.join(stages)}")
    return stages[name]


def read_stages(
    path: str | Path, overrides: Sequence[str] = (), *, as_planned: bool = False
) -> dict[str, LoadedExperiment]:
    """All stages of a file, in their order.

    Overrides are for every stage, or for one: `stages.ppo.trainer.total_steps=10`. `as_planned` puts the model that a
    stage starts from in the place of the one that it will export, so that all can be checked before the first runs.
    Raises ConfigError.
    """
    stages: dict[str, LoadedExperiment] = {}
    documents, problems = _documents(Path(path), overrides)
    exported = {stage for document in documents.values() for _, stage in _references(document.values)}
    for name, document in documents.items():
        _refuse_later_stages(document, list(stages))
        exports = {earlier: str(Path(loaded.config.trainer.run_dir) / EXPORTED) for earlier, loaded in stages.items()}
        named = {stage for _, stage in _references(document.values)}
        models = {earlier: loaded.config.model.path for earlier, loaded in stages.items()} if as_planned else exports
        values = _replaced(document.values, models)
        trainer = values.get("trainer")
        if isinstance(trainer, dict):
            if isinstance(trainer.get("run_dir"), str):
                trainer["run_dir"] = str(Path(trainer["run_dir"]) / name)
            if name in exported:
                trainer["export_hf"] = True
                _export_merged(values)
        loaded = validated(Document(values, document.locations), problems[name])
        stages[name] = replace(loaded, built_on={stage: exports[stage] for stage in stages if stage in named})
    return stages


def _documents(path: Path, overrides: Sequence[str]) -> tuple[dict[str, Document], dict[str, list[Problem]]]:
    """The settings of each stage with the overrides laid over them, and what is wrong with these."""
    names = list(_sections(read_with_bases(path)))
    for override in overrides:
        if override.startswith(f"{STAGES}.") and override.split(".")[1] not in names:
            raise ConfigError(f"{override} (command line): there is no such stage; the stages are {', '.join(names)}")
    documents = {name: _document(path, name) for name in names}
    problems = {
        name: [problem for override in _overrides_of(overrides, name) for problem in apply_override(document, override)]
        for name, document in documents.items()
    }
    return documents, problems


def _export_merged(values: dict[str, Any]) -> None:
    """A model that a later stage reads is whole, also where adapters were trained."""
    model = values.get("model")
    lora = model.get("lora") if isinstance(model, dict) else None
    if isinstance(lora, dict) and lora.get("rank"):
        lora["export_merged"] = True


def _sections(document: Document) -> dict[str, dict[str, Any]]:
    """The settings of each stage. ConfigError where they are none, or a name is no folder's."""
    stages, where = document.values[STAGES], document.locations.get(STAGES, "")
    if not isinstance(stages, dict) or not stages:
        raise ConfigError(f"{STAGES} ({where}): has to map names to settings, for example sft: {{base: sft.yaml}}")
    for name, section in stages.items():
        if not name.replace("-", "").replace("_", "").isalnum():
            raise ConfigError(f"{STAGES}.{name} ({where}): names a folder too; use letters, digits, - and _")
        if not isinstance(section, dict):
            raise ConfigError(f"{STAGES}.{name} ({where}): has to be settings, as at the top of an experiment file")
    return dict(stages)


def _document(path: Path, name: str) -> Document:
    """A stage's settings over the file's over those of the stage's base."""
    shared = read_with_bases(path)
    section = _sections(shared)[name]
    prefix = f"{STAGES}.{name}."
    own = Document(
        {key: value for key, value in section.items() if key != BASE},
        {place.removeprefix(prefix): line for place, line in shared.locations.items() if place.startswith(prefix)},
    )
    document = Document({})
    if BASE in section:
        # As seen from the file that names it, which may be a base of this one.
        file = Path(shared.locations[prefix + BASE].rpartition(":")[0])
        base = file.parent / str(section[BASE])
        if not base.is_file():
            where = shared.locations[prefix + BASE]
            raise ConfigError(f"{prefix}{BASE}: {section[BASE]} ({where}): {base} does not exist")
        document = read_with_bases(base)
        document.values.pop(STAGES, None)
    del shared.values[STAGES]
    merge(document, shared)
    merge(document, own)
    return document


def _overrides_of(overrides: Sequence[str], name: str) -> list[str]:
    """Those for all stages, then those for this one."""
    own = f"{STAGES}.{name}."
    general = [override for override in overrides if not override.startswith(f"{STAGES}.")]
    return general + [override.removeprefix(own) for override in overrides if override.startswith(own)]


def _refuse_later_stages(document: Document, earlier: Sequence[str]) -> None:
    for place, stage in _references(document.values):
        if stage not in earlier:
            known = f"the earlier stages are {', '.join(earlier)}" if earlier else "there is no earlier stage"
            where = document.locations.get(place, "")
            raise ConfigError(f"{place}: {PREFIX}{stage} ({where}): is no earlier stage's model; {known}")


def _references(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """(YAML path, stage) of every string that names a stage's model."""
    if isinstance(value, str) and value.startswith(PREFIX):
        yield place, value.removeprefix(PREFIX)
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from _references(child, f"{place}.{key}" if place else str(key))


def _replaced(value: Any, models: Mapping[str, str]) -> Any:
    """A copy of `value` with `models[NAME]` for every `stage:NAME`."""
    if isinstance(value, str) and value.startswith(PREFIX):
        return models[value.removeprefix(PREFIX)]
    if isinstance(value, dict):
        return {key: _replaced(child, models) for key, child in value.items()}
    return [_replaced(child, models) for child in value] if isinstance(value, list) else value
