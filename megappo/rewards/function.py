"""Reward functions of the user: finding `module:function`, checking what it returns. Running them is in `pool.py`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable
from numbers import Real
from pathlib import Path
from typing import Any

from megappo.errors import RewardError
from megappo.rewards.reward import Reward


def load_function(path: str) -> Callable[..., Any]:
    """Imports `module:function`, with the working folder importable as in a Python session.

    Raises RewardError with the nearest existing name, or with the traceback of a module that fails to import.
    """
    module_name, colon, function_name = path.partition(":")
    if not (module_name and colon and function_name):
        raise RewardError(f"reward function {path!r}: write module:function, for example my_rewards:length_bonus")
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)
    # A module may have been written since this process first looked into its folder.
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise RewardError(f"reward function {path!r}: {_no_module(module_name, folder)}") from error
        raise RewardError(f"reward function {path!r}: module {module_name!r} needs {error.name!r}: {error}") from error
    except Exception as error:
        raise RewardError(
            f"reward function {path!r}: module {module_name!r} fails to import:\n{traceback.format_exc()}"
        ) from error
    return _function_of(module, function_name, path)


def as_reward(result: object, path: str, num_tokens: int | None = None) -> Reward:
    """What a reward function returned, as a Reward of finite numbers; TypeError or ValueError otherwise.

    A list or tuple is one reward for each of the response's `num_tokens` tokens (not counted where None).
    """
    reward = result if isinstance(result, Reward) else None
    if isinstance(result, list | tuple):
        reward = Reward(0.0, token_scores=tuple(result))
    score = reward.score if reward else result
    if not isinstance(score, Real):
        raise TypeError(
            f"{path} returned {score!r} ({type(score).__name__}); return a float, or megappo.rewards.reward.Reward"
        )
    if not math.isfinite(score):
        raise ValueError(f"{path} returned {float(score)}; a score must be finite")
    if reward is None or reward.token_scores is None:
        return Reward(float(score), reward.details if reward else {})
    return Reward(float(score), reward.details, _token_scores(reward.token_scores, path, num_tokens))


def _token_scores(values: object, path: str, num_tokens: int | None) -> tuple[float, ...]:
    if not isinstance(values, list | tuple):
        raise TypeError(f"{path} returned token scores {values!r} ({type(values).__name__}); return a list or tuple")
    for place, value in enumerate(values):
        if not isinstance(value, Real):
            raise TypeError(f"{path} returned {value!r} ({type(value).__name__}) for token {place}; return a float")
        if not math.isfinite(value):
            raise ValueError(f"{path} returned {float(value)} for token {place}; a reward must be finite")
    if num_tokens is not None and len(values) != num_tokens:
        raise ValueError(
            f"{path} returned {len(values)} token rewards for a response of {num_tokens} tokens (sample.response_ids)"
        )
    return tuple(float(value) for value in values)


def _function_of(module: Any, name: str, path: str) -> Callable[..., Any]:
    if not hasattr(module, name):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise RewardError(
            f"reward function {path!r}: {module.__name__!r} ({module.__file__}) has no {name!r}"
            f"{_nearest(name, functions)}"
        )
    function = getattr(module, name)
    if not callable(function):
        raise RewardError(f"reward function {path!r}: {name!r} is a {type(function).__name__}, not a function")
    try:
        inspect.signature(function).bind(object())
    except TypeError as error:
        raise RewardError(
            f"reward function {path!r}: it must take one argument, the sample; its signature is "
            f"{name}{inspect.signature(function)}"
        ) from error
    except ValueError:
        # Some callables written in C have no signature; the first call tells.
        return function  # type: ignore[no-any-return]
    return function  # type: ignore[no-any-return]


def _no_module(module_name: str, folder: str) -> str:
    names = [path.stem for path in Path(folder).glob("*.py")]
    names += [path.parent.name for path in Path(folder).glob("*/__init__.py")]
    return f"no module {module_name!r} in {folder} or among the installed packages{_nearest(module_name, names)}"


def _nearest(name: str, choices: list[str]) -> str:
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there is {', '.join(sorted(choices)[:8])}" if choices else ""
