"""`megappo train FILE` of a file with stages: one run after another, going on at the stage where it stopped."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megappo.cli.built_on import ancestors, has_trained, refuse_changed, refuse_unfinished
from megappo.cli.experiment import name_interrupted, world_size
from megappo.config.checkpoint_folder import going_on
from megappo.config.checks import check_experiment
from megappo.config.experiment import ExperimentConfig
from megappo.config.load import LoadedExperiment, load_experiment
from megappo.config.problem import raise_errors
from megappo.config.stages import read_stages
from megappo.errors import ConfigError, ExitCode
from megappo.launcher.environment import is_joined
from megappo.observe.run_folder import RunFolder

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
        self._refuse_lost(stages, done)
        refuse_changed(stages, stages)
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

    def check_alone(self, name: str) -> None:
        """ConfigError where the stage `name` can't be run on what the stages before it have left by now: a model that
        it reads is not there or not finished, or it, or what it builds on, was trained from another one.

        Gives no folder its name back, for the other stages may be running.
        """
        stages = read_stages(self.file, self.overrides)
        refuse_unfinished(stages, name)
        refuse_changed(stages, [*ancestors(stages, name), name])

    def _refuse_lost(self, stages: Mapping[str, LoadedExperiment], done: Sequence[str]) -> None:
        """ConfigError where a stage has run, to its end or not, from the model of one that will be trained anew."""
        folders: dict[str, str] = {}
        causes: list[str] = []
        for name, loaded in stages.items():
            lost = [earlier for earlier in loaded.built_on if earlier not in done]
            if has_trained(loaded.config) and (lost or loaded.built_on.keys() & folders.keys()):
                folders[name] = loaded.config.trainer.run_dir
                causes += lost
        if folders:
            cause = causes[0]
            raise ConfigError(
                f"stage {cause}: {stages[cause].config.trainer.run_dir} does not hold its finished run, and what is in "
                f"{', '.join(folders.values())} was trained from the model that it had left; remove the latter to "
                "train it anew too, or put the finished run back"
            )

    def _read(self, *, as_planned: bool = False) -> dict[str, LoadedExperiment]:
        stages = read_stages(self.file, self.overrides, as_planned=as_planned)
        for loaded in stages.values():
            name_interrupted(loaded.config)
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
    is_finished = RunFolder(folder).state == "done"
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
