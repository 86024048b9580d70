"""Checkpoint folders as far as they can be read without torch: which one a run goes on from, and of which model.

Their weights, and writing them, are in `trainer/checkpoint.py`.
"""

import json
from pathlib import Path
from typing import Any

from megappo.config.checkpoint_names import LATEST, MANIFEST, is_complete, readable
from megappo.config.experiment import ExperimentConfig
from megappo.config.model_folder import ModelFacts, read_model_facts
from megappo.errors import ConfigError, DataError

STATE = "trainer.json"
EVALUATION = "evaluation.json"
"""Added to a checkpoint that was saved before the evaluation after its step, once that is done: which was the best."""
MODEL_FILES = "model"
"""Folder of a checkpoint with the model's configuration and tokenizer, so that it can be read without its run."""
BEST = "best"
"""The checkpoint with the best evaluation (`trainer.best_metric`)."""


def checkpoint_folder(config: ExperimentConfig) -> Path:
    """Where the run keeps its checkpoints."""
    return Path(config.trainer.run_dir) / "checkpoints"


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, in the order in which they were written."""
    found = [path for path in folder.glob("step-*") if path.name[5:].isdigit() and (path / MANIFEST).is_file()]
    return sorted(found, key=lambda path: ((path / MANIFEST).stat().st_mtime_ns, path.name))


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that `folder`/latest points to, else the one written last; None where there is none.

    The pointer is followed first: somebody may have turned it back to an older checkpoint.
    """
    pointer = folder / LATEST
    if (pointer / MANIFEST).is_file():
        return folder / pointer.resolve().name
    return next(reversed(complete_checkpoints(folder)), None)


def readable_checkpoint(folder: Path) -> Path | None:
    """Like `latest_checkpoint`, for who only reads: one that a kill has left without its name is found too."""
    found = readable(folder / LATEST)
    return folder / found.resolve().name if is_complete(found) else None


def going_on(config: ExperimentConfig) -> ExperimentConfig:
    """The experiment with `--resume`: from the run's own newest checkpoint, where it has none from the one that
    `trainer.resume` names, and else from the start."""
    resume = config.trainer.resume
    if resume not in ("auto", "never") and latest_checkpoint(checkpoint_folder(config)) is None:
        return config
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"resume": "auto"})})


def checkpoint_to_resume(config: ExperimentConfig) -> Path | None:
    """The checkpoint that the run goes on from, None where it starts anew.

    Raises ConfigError where it may not start anew, DataError where the checkpoint is incomplete or of another model.
    """
    resume = config.trainer.resume
    latest = latest_checkpoint(checkpoint_folder(config))
    if resume == "never":
        if latest is not None:
            raise ConfigError(
                f"trainer.run_dir: {config.trainer.run_dir} holds the checkpoint {latest.name}; go on from it with "
                "trainer.resume=auto (--resume), or choose another folder"
            )
        return None
    path = latest if resume == "auto" else readable(resume)
    if path is not None:
        state = read_state(path)
        if state["step"] == 0:
            raise DataError(
                f"{path}: holds weights alone (megappo convert wrote it) and no run to go on with; start a new run "
                "from its Hugging Face folder: model.path"
            )
        check_same_model(path, state["model"], config.model.path)
    return path


def read_state(path: Path) -> dict[str, Any]:
    """The JSON state of the checkpoint `path`; DataError where it is no complete checkpoint, or damaged."""
    if not (path / MANIFEST).is_file():
        raise DataError(
            f"{path}: not a complete checkpoint (no {MANIFEST}); name a folder like runs/NAME/checkpoints/step-000010"
        )
    return read_part(path, STATE)


def read_part(path: Path, name: str) -> dict[str, Any]:
    """One of a checkpoint's JSON files; DataError where it is none any more."""
    try:
        content = json.loads((path / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path}: the file {name} is missing; resume from another checkpoint") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise damaged(path, name) from None
    if not isinstance(content, dict):
        raise damaged(path, name)
    return content


def damaged(path: Path, name: str) -> DataError:
    return DataError(f"{path}: the file {name} is damaged; resume from another checkpoint")


def signature(facts: ModelFacts) -> dict[str, Any]:
    """What two models must share to load each other's checkpoints."""
    return {
        "model_type": facts.model_type,
        "num_layers": facts.num_layers,
        "hidden_size": facts.hidden_size,
        "num_heads": facts.num_heads,
        "num_kv_heads": facts.num_kv_heads,
        "vocab_size": facts.vocab_size,
        "num_experts": facts.num_experts,
    }


def check_same_model(path: Path, saved: dict[str, Any], folder: str) -> None:
    """DataError where the checkpoint, whose signature is `saved`, is of another model than that in `folder`."""
    ours = signature(read_model_facts(folder))
    differing = [
        f"{key} {saved.get(key)} there, {value} in {folder}" for key, value in ours.items() if saved.get(key) != value
    ]
    if differing:
        raise DataError(
            f"{path}: a checkpoint of another model ({'; '.join(differing)}); set model.path to that model's folder"
        )
