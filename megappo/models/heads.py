"""The value head that stands in the place of a value model's output layer."""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional


class ValueHead(nn.Module):
    """One float32 number a token. Every TP rank holds the weight `[1, hidden]`, zero until something is imported.

    Under sequence parallelism the sequence is gathered first, so that every rank computes every value: the weight's
    gradient is then whole on each rank without a reduction, and the hidden states' gradient is cut, not summed, on the
    way back.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        sequence_parallel: bool,
        tp_group: ProcessGroup,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype, device=device))
        self.sequence_parallel = sequence_parallel
        self.tp_group = tp_group

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """`[s, b, hidden]` (`[s / tp, b, hidden]` under sequence parallelism) → (`[s, b, 1]` float32, no bias).

        The other arguments are what GPTModel passes to an output layer; a value model is untied, so there is no weight
        in them.
        """
        assert weight is None, "a value model is built untied"
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return functional.linear(hidden.float(), self.weight.float()), None
