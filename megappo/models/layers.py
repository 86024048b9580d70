"""Torch layers for Megatron's layer spec where Transformer Engine is missing: RMSNorm and core attention.

Megatron's own local layers refuse sequence parallelism, packed sequences and context parallelism; these two allow them.
Which layers a model gets is decided in `spec.py`. Packed sequences go through PyTorch's kernel for sequences of varied
lengths where it takes them (a GPU, half precision), and one after another elsewhere; neither writes out a mask.
"""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

import inspect
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn

from megappo.models.context import ContextRow
from megappo.models.scores import causal_attention

# torch 2.13 wants to be told of grouped KV heads, 2.11 takes them unasked.
_GROUPED_HEADS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


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

    Takes Megatron's `[s, b, heads, head_dim]`, or `[tokens, heads, head_dim]` with `PackedSeqParams`; under context
    parallelism this rank's tokens (`experience/context.py`), and exchanges as `cp_comm_type` says (`context.py`).
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
        self.cp_comm_type = cp_comm_type
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
        """Context `[s, b, heads · head_dim]`, packed `[tokens, …]`; fewer queries than keys are the last of them."""
        assert attention_bias is None and attention_mask is None, "this attention is causal by itself; use layers: te"
        packing = packed_seq_params if query.dim() == 3 else None
        if self.cp_group.size() > 1:
            return self._shared(query, key, value, packing)
        if packing is not None:
            return self._packed(query, key, value, packing)
        if query.size(0) == key.size(0) and self.window is not None and self._has_kernel(query, value):
            return self._with_kernel_of_rows(query, key, value)
        return self._causal(query, key, value).flatten(2)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, packing: PackedSeqParams) -> Tensor:
        """Causal attention inside each of the packed sequences: `[tokens, heads, head_dim]` → `[tokens, …]`.

        Nothing of the size tokens² exists, and no sequence's result depends on another's values.
        """
        if self._has_kernel(query, value):
            return self._with_kernel(query, key, value, packing).flatten(1)
        lengths = packing.cu_seqlens_q.diff().tolist()
        parts = (tensor.split(lengths) for tensor in (query, key, value))
        contexts = []
        for own in zip(*parts, strict=True):
            contexts.append(self._causal(*own))
        return torch.cat(contexts).flatten(1)

    def _has_kernel(self, query: Tensor, value: Tensor) -> bool:
        """Whether PyTorch's kernel for sequences of varied lengths (Flash Attention) computes this attention."""
        takes_tensors = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
        takes_sizes = query.size(-1) == value.size(-1) <= 256 and query.size(-1) % 8 == 0
        return takes_tensors and takes_sizes and self.softcap is None and not (self.training and self.dropout)

    def _with_kernel(self, query: Tensor, key: Tensor, value: Tensor, packing: PackedSeqParams) -> Tensor:
        """`[tokens, heads, head_dim]` of all packed sequences in one call, without waiting for the device."""
        before = -1 if self.window is None else self.window - 1  # keys that a query sees before its own; -1: all
        context: Tensor = varlen_attn(
            query, key, value, packing.cu_seqlens_q, packing.cu_seqlens_kv, packing.max_seqlen_q, packing.max_seqlen_kv,
            scale=self.softmax_scale, window_size=(before, 0), **_GROUPED_HEADS,
        )  # type: ignore[assignment]  # fmt: skip
        return context

    def _with_kernel_of_rows(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`[s, b, heads, head_dim]` → `[s, b, …]`: rows of one length, as packed sequences of that length."""
        length, num_rows = query.shape[:2]
        ends = torch.arange(0, (num_rows + 1) * length, length, device=query.device, dtype=torch.int32)
        packing = PackedSeqParams("thd", ends, ends, max_seqlen_q=length, max_seqlen_kv=length)
        query, key, value = (tensor.transpose(0, 1).flatten(0, 1) for tensor in (query, key, value))
        context = self._with_kernel(query, key, value, packing)
        return context.unflatten(0, (num_rows, length)).transpose(0, 1).flatten(2)

    def _shared(self, query: Tensor, key: Tensor, value: Tensor, packing: PackedSeqParams | None) -> Tensor:
        """Causal attention inside sequences whose tokens are shared by the context-parallel ranks.

        One call a sequence, or a chunk of one to all keys up to its end: nothing is computed that the mask hides but on
        the diagonal.
        """
        length = query.size(0) * self.cp_group.size()
        row = ContextRow(self.cp_group, (0, length) if packing is None else tuple(packing.cu_seqlens_q.tolist()))
        if self.cp_comm_type == "a2a":
            query, key, value = map(row.heads_for_tokens, (query, key, value))
            parts = row.sequences()
        else:
            key, value = row.gathered(key), row.gathered(value)
            parts = row.chunks()
        contexts = [self._causal(query[part.queries], key[part.keys], value[part.keys]) for part in parts]
        context = torch.cat(contexts)
        if self.cp_comm_type == "a2a":
            context = row.tokens_for_heads(context)
        return context.flatten(-2)

    def _causal(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`[s, heads, head_dim]` or `[s, b, …]` of queries that are the last of the keys' positions → the same."""
        if query.dim() == 3:
            return self._causal(query[:, None], key[:, None], value[:, None])[:, 0]
        is_plain = self.softcap is None and (self.window is None or self.window >= key.size(0))
        num_queries, num_keys = query.size(0), key.size(0)
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        if is_plain and num_queries != num_keys:
            # With a kernel that knows this mask (CUDA's) it exists nowhere.
            context = functional.scaled_dot_product_attention(
                query, key, value, attn_mask=causal_lower_right(num_queries, num_keys), dropout_p=dropout,
                scale=self.softmax_scale, enable_gqa=key.size(1) != query.size(1),
            )  # fmt: skip
        else:
            context = causal_attention(query, key, value, self.softmax_scale, self.window, self.softcap, dropout)
        return context.permute(2, 0, 1, 3)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Nothing to save."""
        return {}
