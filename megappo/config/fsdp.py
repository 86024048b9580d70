"""Whether the data-parallel ranks share the parameters of a role, and how they get them for a pass."""

from megappo.config.base import Section


class RefFsdpConfig(Section):
    """Parameters cut over the data-parallel ranks (ZeRO-3), by torch's `fully_shard`."""

    enable: bool = False
    """Every data-parallel rank keeps its part of each parameter alone; a layer's are gathered when it runs."""
    reshard_after_forward: bool = True
    """Give a layer's gathered parameters up after its forward pass; false keeps them for the backward pass, which then
    gathers nothing."""
    forward_prefetch: bool = False
    """Begin to gather the next layer's parameters before a layer's forward pass is computed, not while it is."""


class FsdpConfig(RefFsdpConfig):
    """Parameters, gradients and optimizer states cut over the data-parallel ranks (ZeRO-3), by torch's
    `fully_shard`."""

    reduce_each_micro_batch: bool = True
    """Reduce gradients to a rank's part after every micro-batch; false keeps whole ones until the last, which is
    less communication and more memory."""
