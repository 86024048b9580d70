"""How many of a model's layers each pipeline stage gets. Pure arithmetic: imports no torch.

With virtual stages it is these that are counted: `layout.pp` · `layout.vpp` of them, stage s on pipeline rank s mod pp.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class PipelineSplit:
    """What makes stages unequal, under Megatron's names; the default is equal stages.

    Either the first and the last stage get a number of their own and the others share the rest, or embedding and output
    layer count as a layer each.
    """

    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False

    @property
    def counted(self) -> int:
        """How many of embedding and output layer count as layers."""
        return self.account_for_embedding_in_pipeline_split + self.account_for_loss_in_pipeline_split

    def stages(self, num_layers: int, pp: int) -> list[int] | None:
        """Layers of each of `pp` stages, at least one; None where they can't be split so."""
        if pp == 1:
            return [num_layers]
        first, last = self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage
        if first is None and last is None:
            share, rest = divmod(num_layers + self.counted, pp)
            stages = [share] * pp
            stages[0] -= self.account_for_embedding_in_pipeline_split
            stages[-1] -= self.account_for_loss_in_pipeline_split
            return None if rest or min(stages) < 1 else stages
        num_middle = pp - (first is not None) - (last is not None)
        left = num_layers - (first or 0) - (last or 0)
        share, rest = divmod(left, num_middle) if num_middle else (0, left)
        ends = ([] if first is None else [first], [] if last is None else [last])
        stages = [*ends[0], *[share] * num_middle, *ends[1]]
        return None if rest or min(stages) < 1 else stages


EVEN = PipelineSplit()
