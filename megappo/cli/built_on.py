"""The models that a stage was trained from: noted in its folder when it starts, and compared with those that the
earlier stages hold by now before it, or a stage that builds on it, goes on."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megappo.config.checkpoint_folder import latest_checkpoint
from megappo.config.checkpoint_names import is_complete, readable
from megappo.config.experiment import ExperimentConfig
from megappo.config.load import LoadedExperiment
from megappo.config.weight_files import weight_files
from megappo.errors import ConfigError
from megappo.launcher.environment import own_rank, own_task
from megappo.observe.run_folder import RunFolder, replace_file

NOTE = "built_on.json"
"""Of a run folder: for each earlier stage whose model the stage started from, that model's files."""


def has_trained(config: ExperimentConfig) -> bool:
    """Whether the run's folder holds what was trained, to the end or not."""
    folder = RunFolder(Path(config.trainer.run_dir))
    return folder.state == "done" or latest_checkpoint(folder.checkpoints) is not None


def note_models(loaded: LoadedExperiment) -> None:
    """Notes which models a stage starts from, unless it goes on with what was trained from others. One process does."""
    if loaded.built_on and own_rank() == 0 and own_task() == 0 and not has_trained(loaded.config):
        models = {stage: weight_files(Path(folder)) for stage, folder in loaded.built_on.items()}
        replace_file(Path(loaded.config.trainer.run_dir) / NOTE, json.dumps(models, indent=1))


def refuse_unfinished(stages: Mapping[str, LoadedExperiment], name: str) -> None:
    """ConfigError where a stage whose model the stage `name` reads has not left it, or is training another one."""
    for earlier, model in stages[name].built_on.items():
        folder = stages[earlier].config.trainer.run_dir
        if RunFolder(Path(folder)).state != "done" or not is_complete(readable(model)):
            raise ConfigError(
                f"stage {earlier}: {folder} does not hold its finished run, from whose model stage {name} starts; "
                f"train it first: --stage {earlier}, with --resume where it has stopped"
            )


def refuse_changed(stages: Mapping[str, LoadedExperiment], names: Iterable[str]) -> None:
    """ConfigError where one of the stages `names` was trained from another model than an earlier stage holds by now.

    A model that is gone, and a run without a note (of an earlier version), are not compared.
    """
    for name in names:
        run_dir = stages[name].config.trainer.run_dir
        noted = _noted(Path(run_dir)) if has_trained(stages[name].config) else {}
        for earlier, model in stages[name].built_on.items():
            now = weight_files(Path(model))
            if now and noted.get(earlier, now) != now:
                raise ConfigError(
                    f"stage {name}: {run_dir} was trained from another model than the one that stage {earlier} has in "
                    f"{model} by now; remove the former to train it anew, put the other model back, or delete "
                    f"{Path(run_dir) / NOTE} where the two are the same"
                )


def ancestors(stages: Mapping[str, LoadedExperiment], name: str) -> list[str]:
    """The stages that the stage `name` builds on, and those that these do, in the order of the file."""
    found = set(stages[name].built_on)
    for earlier in reversed(list(stages)):
        if earlier in found:
            found |= stages[earlier].built_on.keys()
    return [stage for stage in stages if stage in found]


def _noted(run_dir: Path) -> dict[str, Any]:
    try:
        content = json.loads((run_dir / NOTE).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # none, or one that a crash of the machine has cut
        return {}
    return content if isinstance(content, dict) else {}
