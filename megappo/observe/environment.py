"""What a run ran on: versions, devices, the commit of the project. For `environment.json`."""

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any


def describe_environment(world_size: int, kernels: Mapping[str, str]) -> dict[str, Any]:
    """JSON values: Python, platform, ranks, GPUs, kernels by the part that they compute, every installed package, and
    the commit where the project is a checkout."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "world_size": world_size,
        "cpus": os.cpu_count(),
        "gpus": _gpus(),
        "kernels": dict(kernels),
        "commit": _commit(),
        "command": sys.argv,
        "packages": _packages(),
    }


def _gpus() -> list[str]:
    import torch

    return (
        [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        if torch.cuda.is_available()
        else []
    )


def _packages() -> dict[str, str]:
    """Versions of the installed packages by name; of two of one name, that which Python finds first."""
    found: dict[str, str] = {}
    for dist in metadata.distributions():
        name: str | None = dist.metadata["Name"]
        if name is not None:  # a folder without METADATA, as a package leaves that was removed in part, names none
            found.setdefault(name, dist.version)
    return dict(sorted(found.items()))


def _commit() -> str | None:
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():  # installed as a package, perhaps inside somebody else's checkout
        return None
    try:
        result = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False)
    except OSError:  # a copy of a checkout on a machine without git
        return None
    return result.stdout.strip() or None
