"""Section `layout`: the parallel sizes of the training shards."""

from pydantic import Field

from megappo.config.base import Section


class LayoutConfig(Section):
    """Megatron's parallel sizes; world size = tp · pp · dp."""

    tp: int = Field(1, ge=1)
    """Tensor parallel size."""
    pp: int = Field(1, ge=1)
    """Pipeline parallel size."""
    dp: int | None = Field(None, ge=1)
    """Data parallel size; null takes world size / (tp · pp), and 1 where megappo starts the ranks on a CPU."""
    sequence_parallel: bool = False
    """Shard activations of norms and residuals over the TP ranks along the sequence; needs tp > 1."""

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tp * self.pp

    @property
    def sequence_alignment(self) -> int:
        """Padded sequence lengths are multiples of this."""
        return self.tp if self.sequence_parallel else 1
