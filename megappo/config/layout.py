"""Section `layout`: the parallel sizes of the training shards."""

from pydantic import Field

from megappo.config.base import Section


class LayoutConfig(Section):
    """Megatron's parallel sizes; world size = tp · pp · dp. Experts cut the tp · dp ranks of a stage anew: etp · ep of
    them hold one copy of the experts."""

    tp: int = Field(1, ge=1)
    """Tensor parallel size."""
    pp: int = Field(1, ge=1)
    """Pipeline parallel size."""
    dp: int | None = Field(None, ge=1)
    """Data parallel size; null takes world size / (tp · pp), and 1 where megappo starts the ranks on a CPU."""
    sequence_parallel: bool = False
    """Shard activations of norms and residuals over the TP ranks along the sequence; needs tp > 1."""

    ep: int = Field(1, ge=1)
    """Expert parallel size: ranks that share the experts of a layer; needs a model with experts, and divides them."""
    etp: int | None = Field(None, ge=1)
    """Expert tensor parallel size: ranks that one expert is cut over. null is 1, whatever `tp` is (Megatron's own
    default is `tp`): whole experts need no communication inside one, and `ep` spreads them."""

    @property
    def expert_tp(self) -> int:
        """`etp`, with its default."""
        return 1 if self.etp is None else self.etp

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tp * self.pp

    @property
    def sequence_alignment(self) -> int:
        """Padded sequence lengths are multiples of this."""
        return self.tp if self.sequence_parallel else 1
