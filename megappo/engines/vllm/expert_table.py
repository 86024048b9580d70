"""The experts of every token in vLLM's KV cache: a table beside it, written in the forward. Imports nothing of vLLM."""

import re
from typing import Any

import torch
from torch import Tensor, nn

from megappo.models.families.base import MoeShape

Rows = Tensor
"""[tokens, layers with experts, top_k] of the table's type."""


class ExpertTable:
    """[layers, slots + 1, top_k] numbers of experts, a row for each slot of the cache; the last is for what has none.

    `nothing` stands where no router has written: 255, or -1 in the wider type of more than 255 experts.
    """

    def __init__(self, num_layers: int, num_slots: int, moe: MoeShape, device: torch.device) -> None:
        dtype = table_dtype(moe)
        self.device = device
        self.nothing = 255 if dtype == torch.uint8 else -1
        with torch.inference_mode(False):  # a tensor of that mode could not be written outside of it
            self._experts = torch.empty(num_layers, num_slots + 1, moe.top_k, dtype=dtype, device=device)
        self.clear()

    def clear(self) -> None:
        """Makes nothing of all rows, as an empty cache has it; a sleep of vLLM has left anything in them."""
        self._experts.fill_(self.nothing)

    def write(self, layer: int, slots: Tensor, experts: Tensor) -> None:
        """A router's choice [tokens, top_k] to the `slots` [tokens] int64 of its tokens, -1 for padding, as are tokens
        beyond the last slot. Waits for nothing and stays in its memory, so that a graph can capture it."""
        assert experts.shape[1] == self._experts.shape[2], f"vLLM's router chose {experts.shape[1]} experts a token"
        # -1 is the last row.
        self._experts[layer].index_put_((slots,), experts[: len(slots)].to(self._experts.dtype))

    def read(self, slots: Tensor) -> Rows:
        """The rows of `slots` [tokens] int64, on the CPU. From a GPU they may arrive later: `synchronize` waits."""
        if self.device.type == "cuda":
            slots = slots.pin_memory().to(self.device, non_blocking=True)
        rows = self._experts.index_select(1, slots).transpose(0, 1).contiguous()
        return rows.to("cpu", non_blocking=True)


def table_dtype(moe: MoeShape) -> torch.dtype:
    """The smallest that has all experts and one value more."""
    return torch.uint8 if moe.num_experts <= 255 else torch.int16


def routers_of(vllm_model: nn.Module) -> dict[int, Any]:
    """vLLM's routers by the number of their layer, in this order. Several modules of a layer may have the same one."""
    found = {}
    for name, module in vllm_model.named_modules():
        router = getattr(module, "router", None)
        number = re.search(r"\.layers\.(\d+)\.", f".{name}")
        if number is not None and hasattr(router, "set_capture_fn"):
            found[int(number[1])] = router
    return dict(sorted(found.items()))
