"""Section `layout`: the parallel sizes of the training shards."""

from math import lcm

from pydantic import Field

from megappo.config.base import Section
from megappo.config.pipeline import PipelineSplit


class LayoutConfig(Section):
    """Megatron's parallel sizes; world size = tp · pp · cp · dp. Experts cut the tp · cp · dp ranks of a stage anew:
    etp · ep of them hold one copy of the experts."""

    tp: int = Field(1, ge=1)
    """Tensor parallel size."""
    pp: int = Field(1, ge=1)
    """Pipeline parallel size."""
    cp: int = Field(1, ge=1)
    """Context parallel size: ranks that share the tokens of each sequence; each holds a copy of the weights."""
    dp: int | None = Field(None, ge=1)
    """Data parallel size; null takes world size / (tp · pp · cp), and 1 where megappo starts the ranks on a CPU."""
    sequence_parallel: bool = False
    """Shard activations of norms and residuals over the TP ranks along the sequence; needs tp > 1."""

    ep: int = Field(1, ge=1)
    """Expert parallel size: ranks that share the experts of a layer; needs a model with experts, and divides them."""
    etp: int | None = Field(None, ge=1)
    """Expert tensor parallel size: ranks that one expert is cut over. null is 1, whatever `tp` is (Megatron's own
    default is `tp`): whole experts need no communication inside one, and `ep` spreads them."""

    vpp: int = Field(1, ge=1)
    """Virtual stages of each pipeline rank (Megatron's interleaved schedule); 1 is none. Layers are cut into pp · vpp
    stages, which the ranks hold in turn, and a pass has a multiple of `pp` micro-batches."""

    num_layers_in_first_pipeline_stage: int | None = Field(None, ge=1)
    """Layers of the first stage, which has the embedding too; null gives it an equal share."""
    num_layers_in_last_pipeline_stage: int | None = Field(None, ge=1)
    """Layers of the last stage, which has the output layer and the loss too; null gives it an equal share."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer of the first stage, which then gets one less."""
    account_for_loss_in_pipeline_split: bool = False
    """Count output layer and loss as a layer of the last stage, which then gets one less."""

    @property
    def num_stages(self) -> int:
        """Stages that the layers are cut into, virtual ones counted."""
        return self.pp * self.vpp

    @property
    def split(self) -> PipelineSplit:
        """How layers are spread over the stages."""
        return PipelineSplit(
            self.num_layers_in_first_pipeline_stage,
            self.num_layers_in_last_pipeline_stage,
            self.account_for_embedding_in_pipeline_split,
            self.account_for_loss_in_pipeline_split,
        )

    @property
    def expert_tp(self) -> int:
        """`etp`, with its default."""
        return 1 if self.etp is None else self.etp

    @property
    def model_parallel_size(self) -> int:
        """Ranks that work on the same sequences: those of a copy of the model, times cp."""
        return self.tp * self.pp * self.cp

    @property
    def fewest_copies(self) -> int:
        """The smallest `dp` whose ranks hold every expert once."""
        ranks = self.tp * self.cp
        return lcm(ranks, self.ep * self.expert_tp) // ranks

    def product(self, sign: str = "·") -> str:
        """Its factors in words: `tp 2 · pp 1`, and `cp` where it is used."""
        sizes = [f"tp {self.tp}", f"pp {self.pp}", *([f"cp {self.cp}"] if self.cp > 1 else [])]
        return f" {sign} ".join(sizes)

    @property
    def sequence_alignment(self) -> int:
        """Padded sequence lengths are multiples of this."""
        return sequence_alignment(self.tp, self.cp, self.sequence_parallel)


def sequence_alignment(tp: int, cp: int, sequence_parallel: bool) -> int:
    """2 · cp chunks of a sequence are equally long, and a rank's two are cut over tp under sequence parallelism."""
    return (2 * cp if cp > 1 else 1) * (tp if sequence_parallel else 1)
