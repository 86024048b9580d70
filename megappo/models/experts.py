"""Grouped experts: all local experts of a layer in two parameters, for Megatron's MoE layer.

A parameter's bytes are the fused weights of the experts one after the other, gate rows before up rows, as inference
engines hold them, so that a generation engine can use the training storage itself. Which token goes to which expert,
and the exchange of tokens between ranks, is Megatron's; the other choice, one module an expert, is its SequentialMLP.
"""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
from torch import Tensor, nn
from torch.nn import functional

# grouped_mm wants rows of a multiple of 16 bytes, which are 8 numbers of bfloat16.
_ALIGNMENT = 8

EXTRA_STATE = "_extra_state"
"""The end of names in Megatron's state of a model that hold what fp8 training needs, which there is none of here."""


class GroupedExperts(MegatronModule):
    """`weight1` [experts, 2 · ffn / etp, hidden] and `weight2` [experts, hidden, ffn / etp] of this rank's experts."""

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, pg_collection: ProcessGroupCollection, **_: Any
    ) -> None:
        super().__init__(config=config)
        self.num_local_experts = num_local_experts
        self.ep_group = pg_collection.ep
        self.tp_group = pg_collection.expt_tp
        self.dp_group = pg_collection.expt_dp
        rows, hidden = config.moe_ffn_hidden_size // self.tp_group.size(), config.hidden_size
        device = None if config.use_cpu_initialization else torch.cuda.current_device()

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_local_experts, *shape, dtype=config.params_dtype, device=device))

        self.weight1 = empty(2 * rows, hidden)
        self.weight2 = empty(hidden, rows)
        self.changes: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {}
        """Of a parameter's name, what adapters make of its product, its tokens and the numbers of tokens."""

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """`tokens` [tokens, hidden], sorted by local expert; `tokens_per_expert` [experts] int; `probs` [tokens].

        Returns this expert TP rank's part of each token's output, times its router probability, and no bias. Experts
        without a token get a gradient of zero.
        """
        gate, up = self._product("weight1", tokens, tokens_per_expert).chunk(2, dim=-1)
        scaled = functional.silu(gate) * up * probs[:, None]
        return self._product("weight2", scaled.to(tokens.dtype), tokens_per_expert), None

    def _product(self, name: str, tokens: Tensor, tokens_per_expert: Tensor) -> Tensor:
        product = grouped_product(tokens, getattr(self, name), tokens_per_expert)
        change = self.changes.get(name)
        return product if change is None else change(product, tokens, tokens_per_expert)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Names and shapes of Megatron's SequentialMLP: either loads what the other saved, on any EP and ETP."""
        # Copies of the same experts are apart in the last place alone; each part of them has one copy to be written.
        replica = (0, 0, self.dp_group.rank())
        axis = len(sharded_offsets)
        ep = (axis, self.ep_group.rank(), self.ep_group.size())
        tp_rank, tp = self.tp_group.rank(), self.tp_group.size()

        def shard(key: str, tensor: Tensor, replica_id: Any, offset: tuple[int, int, int]) -> ShardedTensor:
            return ShardedTensor.from_rank_offsets(
                key, tensor, *sharded_offsets, ep, offset, replica_id=replica_id, prepend_axis_num=axis
            )

        def build(key: str, tensor: Tensor, replica_id: Any, flattened_range: slice | None = None) -> Any:
            """Gate rows and up rows apart: over the expert TP ranks, all gate rows come before all up rows."""
            assert flattened_range is None, "optimizer state is saved in the shape of its parameter"
            gate, up = tensor.chunk(2, dim=1)
            offsets = ((axis + 1, tp_rank, 2 * tp), (axis + 1, tp + tp_rank, 2 * tp))
            return [shard(key, gate, replica_id, offsets[0]), shard(key, up, replica_id, offsets[1])]

        fc1, fc2 = (f"{prefix}experts.linear_{name}.weight" for name in ("fc1", "fc2"))
        weight1, weight2 = self.weight1, self.weight2
        return {
            f"{prefix}weight1": ShardedTensorFactory(fc1, weight1, build, partial(torch.cat, dim=1), replica),
            f"{prefix}weight2": shard(fc2, weight2, replica, (axis + 2, tp_rank, tp)),
            **self._extra_state(prefix, sharded_offsets),
        }

    def _extra_state(self, prefix: str, sharded_offsets: tuple[tuple[int, int, int], ...]) -> dict[str, Any]:
        """The empty extra state that each linear layer of a SequentialMLP saves."""
        num_experts = self.num_local_experts * self.ep_group.size()
        first = self.num_local_experts * self.ep_group.rank()
        replica = (0, self.tp_group.rank(), self.dp_group.rank())
        state = {}
        for expert in range(first, first + self.num_local_experts):
            offsets = (*sharded_offsets, (len(sharded_offsets), expert, num_experts))
            for linear in ("linear_fc1", "linear_fc2"):
                key = f"{prefix}experts.{linear}.{EXTRA_STATE}"
                state[f"{prefix}{expert}.{linear}.{EXTRA_STATE}"] = make_sharded_object_for_checkpoint(
                    None, key, offsets, replica
                )
        return state


def grouped_product(tokens: Tensor, weight: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """`tokens` [tokens, columns] times the transposed matrix of each one's expert, [experts, rows, columns], gives
    [tokens, rows]."""
    is_aligned = weight.size(1) % _ALIGNMENT == 0 and weight.size(2) % _ALIGNMENT == 0
    if tokens.is_cuda and tokens.dtype is torch.bfloat16 and is_aligned and tokens.size(0) > 0:
        ends = tokens_per_expert.to(tokens.device).cumsum(0).to(torch.int32)
        return functional.grouped_mm(tokens, weight.transpose(1, 2), offs=ends)
    parts = tokens.split(tokens_per_expert.tolist())
    return torch.cat([functional.linear(part, matrix) for part, matrix in zip(parts, weight.unbind(0), strict=True)])
