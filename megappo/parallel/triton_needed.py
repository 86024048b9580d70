"""Whether the Triton that megatron-core imports is there. Not here: which versions pip takes (`setup.py`).

megatron-core 0.18 and later import it wherever a GPT model is built, without a GPU too, and declare no dependency.
torch brings it for CUDA alone.
"""

import importlib.util
from importlib import metadata

from packaging.version import Version

from megappo.errors import UserError

FIRST_WITH_TRITON = Version("0.18.0.dev0")


def refuse_missing_triton() -> None:
    """Raises UserError where the megatron-core that would be imported can't be for lack of Triton."""
    try:
        version = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return  # a source tree on the path says itself what it lacks
    problem = missing_triton(version, has_triton=importlib.util.find_spec("triton") is not None)
    if problem:
        raise UserError(problem)


def missing_triton(version: str, *, has_triton: bool) -> str | None:
    """What to tell of megatron-core `version`, and the way out; None where it can be imported."""
    if has_triton or Version(version) < FIRST_WITH_TRITON:
        return None
    return (
        f"megatron-core {version} imports Triton, without a GPU too, and there is none; CPU wheels of torch lack it: "
        "pip install triton, or, where there is none for this system, pip install 'megatron-core==0.16.1'"
    )
