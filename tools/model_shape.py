"""The model that a tool plans or measures with: a published shape, a folder or a config.json. Reads no weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megappo.errors import ConfigError, DataError
from megappo.models.architecture import ModelSpec
from megappo.models.families import FAMILIES
from megappo.models.families.published import PUBLISHED

HELP = f"config.json, its folder, or one of {', '.join(PUBLISHED)}"


def read_shape(name: str, layers: int | None = None) -> ModelSpec:
    """The model of `--shape NAME`, with another number of layers where that is given.

    Raises DataError where there is no such file or no JSON object in it, ConfigError for a model that can't be built.
    """
    config: dict[str, Any]
    if name in PUBLISHED:
        folder, config = Path("."), dict(PUBLISHED[name])
    else:
        path = Path(name)
        file = path / "config.json" if path.is_dir() else path
        folder, config = file.parent, dict(_read(name, file))
    if layers is not None:
        config["num_hidden_layers"] = layers
    model_type = config.get("model_type")
    if model_type is None:
        raise ConfigError(
            f"--shape: {name}: has no model_type; give the config.json of a Hugging Face model, whose model_type is "
            f"one of {', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES.get(model_type)
    if family is None:
        raise ConfigError(
            f"--shape: {name}: model_type {model_type!r} is none of {', '.join(sorted(FAMILIES))}; give a model of one "
            f"of these, or one of {', '.join(PUBLISHED)}"
        )
    try:
        shape = family.shape(config)
    except ConfigError as error:
        raise ConfigError(f"--shape: {name}: {error}") from error
    return ModelSpec(family, shape, folder, config)


def _read(name: str, file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        raise DataError(f"--shape: {name}: no such file; give a config.json, or one of {', '.join(PUBLISHED)}")
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise DataError(f"--shape: {file}: not JSON ({error}); give the config.json of a Hugging Face model") from error
    if not isinstance(config, dict):
        raise DataError(f"--shape: {file}: no JSON object; give the config.json of a Hugging Face model")
    return config
