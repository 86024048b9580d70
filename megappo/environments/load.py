"""Finding `module:class` of an environment."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from megappo.environments.environment import Environment
from megappo.errors import ConfigError

SETTING = "rollout.multi_turn.environment"


def load_environment(path: str) -> Callable[..., Environment]:
    """Imports `module:class`, with the working folder importable as in a Python session.

    Raises ConfigError where there is none, with the traceback of a module that fails to import.
    """
    module_name, _, class_name = path.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)
    importlib.invalidate_caches()  # a module may be newer than this process's look into its folder
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{SETTING}: {path!r}: no module {error.name!r} in {folder} or among the installed packages"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"{SETTING}: {path!r}: module {module_name!r} fails to import:\n{traceback.format_exc()}"
        ) from error
    found: Any = getattr(module, class_name, None)
    if not inspect.isclass(found) or not callable(getattr(found, "answer", None)):
        classes = [name for name, value in vars(module).items() if callable(getattr(value, "answer", None))]
        raise ConfigError(
            f"{SETTING}: {path!r}: {module_name!r} has no class {class_name!r} with a method answer(turn); "
            f"classes that have one: {', '.join(classes) or 'none'}"
        )
    stop = getattr(found, "stop", ())
    if not isinstance(stop, tuple) or not all(isinstance(one, str) and one for one in stop):
        raise ConfigError(f"{SETTING}: {path!r}: its attribute stop is {stop!r}; it has to be a tuple of strings")
    return cast(Callable[..., Environment], found)
