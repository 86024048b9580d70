"""Torch layers for Megatron's layer spec where Transformer Engine is missing: RMSNorm and core attention.

Megatron's own local layers refuse sequence parallelism, packed sequences and context parallelism; these two allow them.
Which layers a model gets is decided in `spec.py`. Of packed sequences the attention takes one after another, without a
mask: many short ones are faster with Transformer Engine.
"""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional


class RMSNorm(nn.RMSNorm):
    """RMSNorm whose weight Megatron reduces over the TP ranks that each saw a part of the sequence.

    The mark on the weight is what `finalize_model_grads` looks for; without it the gradient is silently a part of
    itself.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class CoreAttention(nn.Module):
    """Causal attention of this rank's heads on `scaled_dot_product_attention`, with grouped KV heads.

    Takes Megatron's `[s, b, heads, head_dim]`, or `[tokens, heads, head_dim]` with `PackedSeqParams`. Under context
    parallelism a rank holds chunks r and 2c - 1 - r of the sequence; keys and values are gathered over the CP group.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        self.cp_group = groups.cp
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        """Context `[s, b, heads · head_dim]`, packed `[tokens, 1, …]`. True in `attention_mask` hides a key."""
        assert attention_bias is None, "this attention takes no bias; use layers: te"
        if packed_seq_params is not None and query.dim() == 3:
            return self._packed(query, key, value, packed_seq_params)
        if self.cp_group.size() > 1:
            key, value = self._whole_sequence(key), self._whole_sequence(value)
        mask = self._visible(query, key, attention_mask, attn_mask_type)
        is_square = query.size(0) == key.size(0)
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        context = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None and is_square and attn_mask_type is not AttnMaskType.no_mask,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.softmax_scale,
            enable_gqa=key.size(1) != query.size(1),
        )
        return context.permute(2, 0, 1, 3).flatten(2)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, packing: PackedSeqParams) -> Tensor:
        """Causal attention inside each of the packed sequences: `[tokens, heads, head_dim]` → `[tokens, 1, …]`.

        One call a sequence: nothing of the size tokens² exists, and no sequence's result depends on another's values.
        """
        assert self.cp_group.size() == 1, "packed sequences under context parallelism need layers: te"
        lengths = packing.cu_seqlens_q.diff().tolist()
        heads = (tensor.transpose(0, 1)[None].split(lengths, dim=2) for tensor in (query, key, value))
        contexts = [
            functional.scaled_dot_product_attention(
                own_query,
                own_key,
                own_value,
                is_causal=True,
                dropout_p=self.dropout if self.training else 0.0,
                scale=self.softmax_scale,
                enable_gqa=key.size(1) != query.size(1),
            )
            for own_query, own_key, own_value in zip(*heads, strict=True)
        ]
        return torch.cat(contexts, dim=2)[0].transpose(0, 1).flatten(1)[:, None]

    def _visible(
        self,
        query: Tensor,
        key: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None,
    ) -> Tensor | None:
        """[queries, keys] bool, True where a query sees a key; None is the plain causal mask, or no mask at all."""
        if self.cp_group.size() > 1:
            return self._query_positions(query)[:, None] >= torch.arange(key.size(0), device=key.device)[None]
        if attention_mask is not None:
            return ~attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
        if query.size(0) == key.size(0) or attn_mask_type is AttnMaskType.no_mask:
            return None
        # Queries are the last of the keys' positions, as in decoding with a cache.
        position = torch.arange(key.size(0), device=key.device)
        return position[key.size(0) - query.size(0) :, None] >= position[None]

    def _query_positions(self, query: Tensor) -> Tensor:
        """[s / cp] int64: places in the whole sequence of this CP rank's two chunks."""
        size, rank, chunk = self.cp_group.size(), self.cp_group.rank(), query.size(0) // 2
        place = torch.arange(chunk, device=query.device)
        return torch.cat([place + rank * chunk, place + (2 * size - 1 - rank) * chunk])

    def _whole_sequence(self, tensor: Tensor) -> Tensor:
        """[s / cp, …] → [s, …] in natural order."""
        size = self.cp_group.size()
        gathered = gather_from_sequence_parallel_region(tensor, tensor_parallel_output_grad=True, group=self.cp_group)
        chunks = gathered.chunk(2 * size, dim=0)
        return torch.cat([*chunks[0::2], *reversed(chunks[1::2])], dim=0)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Nothing to save."""
        return {}
