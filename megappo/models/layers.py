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

from megappo.models.scores import softcapped_attention


class RMSNorm(nn.RMSNorm):
    """RMSNorm whose weight Megatron reduces over the TP ranks that each saw a part of the sequence.

    The mark on the weight is what `finalize_model_grads` looks for; without it the gradient is silently a part of
    itself.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.is_zero_centered = config.layernorm_zero_centered_gamma

    def forward(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.weight, self.eps, is_zero_centered=self.is_zero_centered)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float | None, *, is_zero_centered: bool) -> Tensor:
    """RMSNorm over the last dimension, times `weight`, or 1 + weight, which is then computed in float32 as Gemma's."""
    if not is_zero_centered:
        return functional.rms_norm(hidden, weight.shape, weight, eps)
    return functional.rms_norm(hidden.float(), weight.shape, 1 + weight.float(), eps).to(hidden.dtype)


class CoreAttention(nn.Module):
    """Causal attention of this rank's heads on `scaled_dot_product_attention`, with grouped KV heads.

    Takes Megatron's `[s, b, heads, head_dim]`, or `[tokens, heads, head_dim]` with `PackedSeqParams`. Under context
    parallelism a rank holds chunks r and 2c - 1 - r of the sequence; keys and values are gathered over the CP group.
    `window` and `softcap`, as in `ModelShape`, are set by `variants.py`.
    """

    window: int | None = None
    softcap: float | None = None

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
        mask = self._with_window(self._visible(query, key, attention_mask, attn_mask_type), query, key)
        is_causal = query.size(0) == key.size(0) and attn_mask_type is not AttnMaskType.no_mask
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        return self._attend(query, key, value, mask, is_causal).permute(2, 0, 1, 3).flatten(2)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        """`[b, heads, s, head_dim]` of all; `mask` [queries, keys] true where a query sees a key, else `is_causal`."""
        if self.softcap is not None:
            assert mask is not None, "a soft cap is computed with a mask that is written out"
            return softcapped_attention(query, key, value, mask, self.softmax_scale, self.softcap)
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None and is_causal,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.softmax_scale,
            enable_gqa=key.size(1) != query.size(1),
        )

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, packing: PackedSeqParams) -> Tensor:
        """Causal attention inside each of the packed sequences: `[tokens, heads, head_dim]` → `[tokens, 1, …]`.

        One call a sequence: nothing of the size tokens² exists, and no sequence's result depends on another's values.
        """
        assert self.cp_group.size() == 1, "packed sequences under context parallelism need layers: te"
        lengths = packing.cu_seqlens_q.diff().tolist()
        parts = (tensor.split(lengths) for tensor in (query, key, value))
        contexts = []
        for own in zip(*parts, strict=True):
            mask = self._with_window(None, own[0], own[1])
            own_query, own_key, own_value = (tensor.transpose(0, 1)[None] for tensor in own)
            contexts.append(self._attend(own_query, own_key, own_value, mask, is_causal=True))
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

    def _with_window(self, mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
        """`mask` without the keys that are `window` or more positions back; causality written out for a soft cap."""
        length = key.size(0)
        window = length if self.window is None else min(self.window, length)
        if window == length and (self.softcap is None or mask is not None):
            return mask
        places = torch.arange(length, device=key.device)
        own = self._query_positions(query) if self.cp_group.size() > 1 else places[length - query.size(0) :]
        distance = own[:, None] - places[None]
        visible = (distance >= 0) & (distance < window)
        return visible if mask is None else mask & visible

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
