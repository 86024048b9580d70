"""Replacing a name in a dependency so that a vanished target is an error, never a patch without effect."""

from typing import Any


def replace(owner: Any, name: str, value: Any) -> Any:
    """Sets `owner.name = value` and returns what was there.

    Raises RuntimeError where the name is gone: the dependency was changed and the patch has to be read again.
    """
    if not hasattr(owner, name):
        owner_name = getattr(owner, "__name__", repr(owner))
        raise RuntimeError(
            f"{owner_name}.{name} does not exist in this version, so megappo's replacement of it would do nothing; "
            "use megatron-core >= 0.16.1, < 0.20"
        )
    original = getattr(owner, name)
    setattr(owner, name, value)
    return original
