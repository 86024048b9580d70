"""`megappo train FILE` of a file with stages: one run after another, going on at the stage where it stopped."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megappo.cli.experiment import world_size
from megappo.config.checkpoint_folder import going_on
from megappo.config.checks import check_experiment
from megappo.config.experiment import ExperimentConfig
from megappo.config.load import LoadedExperiment, load_experiment
from megappo.config.problem import raise_errors
from megappo.config.stages import read_stages
from megappo.errors import ConfigError, ExitCode
from megappo.launcher.environment import is_joined

RunOne = Callable[[LoadedExperiment], ExitCode]


@dataclass(frozen=True)
class Stages:
    """The stages of a file, with the command line's overrides, number of ranks, and whether it says `--resume`."""

    file: str
    overrides: Sequence[str]
    nproc: int | None
    goes_on: bool = False

    def run(self, run_one: RunOne) -> ExitCode:
        """Checks all stages, then runs those that are not done; returns the first exit code that is not 0.

        Raises ConfigError before the first stage where a later one could not run either.
        """
        if is_joined():
            raise ConfigError(
                f"{self.file}: has stages, and ranks that torchrun or srun started run a single one; start them once "
                "for each, with --stage NAME"
            )
        for loaded in self._read(as_planned=True).values():
            raise_errors(check_experiment(loaded.config, world_size(loaded, self.nproc)), loaded.locations)
        stages = self._read()
        done = [name for name, loaded in stages.items() if is_done(loaded.config)]
        for name, loaded in stages.items():
            where = loaded.config.trainer.run_dir
            if name in done:
                print(f"stage {name}: done in {where}", flush=True)
                continue
            print(f"stage {name}: {where}", flush=True)
            code = run_one(loaded)
            if code is not ExitCode.DONE:
                return code
        return ExitCode.DONE

    def _read(self, *, as_planned: bool = False) -> dict[str, LoadedExperiment]:
        stages = read_stages(self.file, self.overrides, as_planned=as_planned)
        if not self.goes_on:
            return stages
        return {name: replace(loaded, config=going_on(loaded.config)) for name, loaded in stages.items()}


def is_done(config: ExperimentConfig) -> bool:
    """Whether the stage's folder holds its finished run.

    Raises ConfigError where it holds a run of other settings, or any run at all while `trainer.resume` is `never`.
    """
    folder = Path(config.trainer.run_dir)
    status, saved = folder / "status.json", folder / "config.yaml"
    if not status.is_file():
        return False
    if config.trainer.resume == "never":
        raise ConfigError(
            f"trainer.run_dir: {folder} holds a run already; go on at the stage where it stopped with --resume, or "
            "choose another folder"
        )
    is_finished: bool = json.loads(status.read_text(encoding="utf-8"))["state"] == "done"
    # Loaded, so that a setting that a newer version has added counts with its default.
    if is_finished and _learned(load_experiment(saved)) != _learned(config):
        raise ConfigError(
            f"trainer.run_dir: {folder} holds a finished run of other settings (config.yaml there), which later stages "
            "would build on; choose another folder"
        )
    return is_finished


def _learned(config: ExperimentConfig) -> ExperimentConfig:
    """The settings without the one that says how to go on."""
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"resume": "never"})})
