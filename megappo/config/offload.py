"""What a role keeps in host memory while it has nothing to do."""

from megappo.config.base import Section


class RefOffloadConfig(Section):
    """What waits in host memory between a role's phases."""

    params: bool = False
    """Parameters."""


class OffloadConfig(RefOffloadConfig):
    """What waits in host memory between a role's phases."""

    grads: bool = False
    """Gradient buffers: freed, for they begin every update with zeros."""
    optimizer: bool = False
    """The optimizer's moments, and its float32 copies of bfloat16 parameters."""
