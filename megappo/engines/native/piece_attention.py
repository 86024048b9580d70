"""Megatron's self-attention in generation layouts: for groups of more ranks than the model has KV heads, and latent
attention."""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from torch import Tensor

from megappo.engines.native.pieces import WholePieces
from megappo.engines.native.ranks import DecodingRanks
from megappo.models.latent_attention import SpecifiedLatentAttention


class PieceAttention(SelfAttention):
    """Cuts queries, keys and values by the ranks that decode together.

    With fewer KV heads than ranks, Megatron gathers the fused rows of all ranks and takes the rank's heads out of them,
    by the training group (0.16.1) or by the order in the group (0.19.2); neither is right for a generation group.
    """

    ranks: DecodingRanks

    def get_query_key_value_tensors(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> Any:
        """[T, 1, H] → query [T, 1, heads / ranks, head_dim], and key and value of the one KV head that they share."""
        num_groups, size = self.config.num_query_groups, self.ranks.tp_group.size()
        if num_groups >= size:
            return super().get_query_key_value_tensors(hidden_states, key_value_states, output_gate, split_qkv)
        assert split_qkv and not output_gate, "the decoding loop asks for separate queries, keys and values, no gate"
        rows = self._gathered(self.linear_qkv(hidden_states)[0])
        ranks_per_group = size // num_groups
        group, place = divmod(self.ranks.place, ranks_per_group)
        heads = rows.unflatten(-1, (num_groups, -1, self.hidden_size_per_attention_head))[..., group, :, :]
        query, key, value = heads.split([heads.shape[-2] - 2, 1, 1], dim=-2)
        query = query.chunk(ranks_per_group, dim=-2)[place]
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        return query, key, value

    def _gathered(self, rows: Tensor) -> Tensor:
        """[..., rows / ranks] → [..., rows], in the order of the shards."""
        shards = [torch.empty_like(rows) for _ in range(self.ranks.tp_group.size())]
        dist.all_gather(shards, rows.contiguous(), group=self.ranks.tp_group)
        return torch.cat([shards[index] for index in self.ranks.tp_order], dim=-1)


class PieceLatentAttention(SpecifiedLatentAttention):
    """Latent attention whose down projections every rank computes whole, as in training; the others are cut by heads.

    Megatron builds them of its own classes alone (0.16.1), which are exchanged afterwards.
    """

    def __init__(self, config: Any, submodules: MLASelfAttentionSubmodules, *arguments: Any, **options: Any) -> None:
        own = ColumnParallelLinear
        submodules = replace(submodules, linear_q_down_proj=own, linear_kv_down_proj=own)
        super().__init__(config, submodules, *arguments, **options)
        self.linear_kv_down_proj = WholePieces()
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = WholePieces()
