"""Attention over the key-value cache, in the place of a layer's `core_attention`. The rest stays Megatron's."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megappo.engines.native.cache import KVCache
from megappo.engines.native.tokens import PrefillTokens, StepTokens
from megappo.models.scores import causal_attention, softcapped_attention


class CurrentStep:
    """The step that the swapped modules compute, and its cache: set before each forward, read by every layer."""

    def __init__(self) -> None:
        self._tokens: StepTokens | None = None
        self._cache: KVCache | None = None

    def enter(self, tokens: StepTokens, cache: KVCache) -> None:
        """The next forward is that of `tokens`, whose sequences are in `cache`."""
        self._tokens, self._cache = tokens, cache

    @property
    def tokens(self) -> StepTokens:
        assert self._tokens is not None, "a decoding module ran outside of a step"
        return self._tokens

    @property
    def cache(self) -> KVCache:
        assert self._cache is not None, "a decoding module ran outside of a step"
        return self._cache


class CachedAttention(nn.Module):
    """Causal attention of a step's tokens to the cached positions of their own sequences.

    Called like Megatron's core attention: query [T, 1, heads, head_dim], key and value [T, 1, kv heads, head_dim]
    (this rank's heads, RoPE applied) → [T, 1, heads · head_dim]. Rows of padding are 0. Values, and with them the
    result, may have another width than keys (latent attention).
    """

    def __init__(
        self,
        layer: int,
        step: CurrentStep,
        softmax_scale: float | None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        self._layer = layer
        self._step = step
        self._scale = softmax_scale  # None: 1 / sqrt(head_dim)
        self._window = window  # None: all cached positions
        self._softcap = softcap

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
        """Query, key, value [T, 1, heads, head_dim] → [T, 1, heads · head_dim]; keys and values go to the cache."""
        tokens = self._step.tokens
        num_tokens, num_decoding = tokens.num_tokens, tokens.num_decoding
        self._step.cache.write(
            self._layer, tokens.slots, tokens.positions[:num_tokens], key[:num_tokens, 0], value[:num_tokens, 0]
        )
        parts = []
        if num_decoding:
            parts.append(self._decode(query[:num_decoding, 0], tokens))
        if tokens.prefill is not None:
            parts.append(self._prefill(query[num_decoding:num_tokens, 0], tokens.prefill))
        if len(query) > num_tokens:
            parts.append(query.new_zeros(len(query) - num_tokens, query.shape[2], value.shape[3]))
        return torch.cat(parts).flatten(1)[:, None]

    def _decode(self, query: Tensor, tokens: StepTokens) -> Tensor:
        """One token of each of the first slots: [n, heads, head_dim] → the same."""
        key, value = (
            part[: tokens.num_decoding, :, : tokens.longest_decoding] for part in self._step.cache.layers[self._layer]
        )
        # The query heads that share a KV head take the place of the query positions: nothing is repeated.
        grouped = query.unflatten(1, (key.shape[1], -1))
        mixed = self._mix(grouped, key, value, self._in_window(tokens))
        return mixed.flatten(1, 2)

    def _in_window(self, tokens: StepTokens) -> Tensor:
        """`is_visible` of the step without the positions that the window hides."""
        if self._window is None or tokens.longest_decoding <= self._window:
            return tokens.is_visible
        first = tokens.positions[: tokens.num_decoding] - self._window + 1
        places = torch.arange(tokens.longest_decoding, device=first.device)
        return tokens.is_visible & (places >= first[:, None])[:, None, None]

    def _prefill(self, query: Tensor, prefill: PrefillTokens) -> Tensor:
        """Whole prompts: [prompt tokens, heads, head_dim] → the same. Right-padded, so that causal is all the mask."""
        slots = slice(prefill.first_slot, prefill.first_slot + prefill.num_prompts)
        num_heads = query.shape[1]
        padded = query.new_zeros(prefill.num_prompts, num_heads, prefill.longest, query.shape[2])
        padded[prefill.prompts, :, prefill.positions] = query
        key, value = (
            # Repeated for the query heads by hand: `enable_gqa` falls back to a quadratic kernel outside of flash.
            part[slots, :, : prefill.longest].repeat_interleave(num_heads // part.shape[1], dim=1)
            for part in self._step.cache.layers[self._layer]
        )
        mixed = causal_attention(padded, key, value, self._scale, self._window, self._softcap)
        return mixed[prefill.prompts, :, prefill.positions]

    def _mix(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None) -> Tensor:
        """Attention of [..., queries, head_dim] to what `visible` [..., queries, keys] shows; None is causal."""
        if self._softcap is not None:
            assert visible is not None, "a soft cap is computed with a mask that is written out"
            return softcapped_attention(query, key, value, visible, self._scale, self._softcap)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, is_causal=visible is None, scale=self._scale
        )
