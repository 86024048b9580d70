"""What attention asks of PyTorch's kernel for packed sequences, and when. The kernel itself runs on a GPU alone
(tests/gpu/test_packed_attention.py): a stand-in does here what its documentation says."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megappo.models import layers
from megappo.models.layers import CoreAttention
from tests.support.attention import ALONE, core_attention, packing_of


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, key_ends: Tensor, longest: int, longest_key: int, *,
    scale: float | None, window_size: tuple[int, int], **others: Any,
) -> Tensor:  # fmt: skip
    """torch.nn.attention.varlen.varlen_attn by a mask: query i sees keys i + left to i + right of its sequence."""
    assert others == layers._GROUPED_HEADS and torch.equal(ends, key_ends) and longest == longest_key
    assert longest == int(ends.diff().max())
    number = torch.bucketize(torch.arange(len(query)), ends[1:], right=True)
    places = torch.arange(len(query))
    distance = places[:, None] - places[None]
    left, right = (len(query) if size < 0 else size for size in window_size)
    visible = (number[:, None] == number[None]) & (distance <= left) & (distance >= -right)
    key, value = (tensor.repeat_interleave(query.size(1) // key.size(1), dim=1) for tensor in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * (scale or query.size(-1) ** -0.5)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), value)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_kernel_is_asked_for_each_sequence_alone(
    window: int | None, scale: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(16, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    attention, packing = core_attention(ALONE, None, window), packing_of((1, 4, 9, 2))
    attention.softmax_scale = scale
    expected = attention(query, key, value, None, packed_seq_params=packing)
    monkeypatch.setattr(CoreAttention, "_has_kernel", lambda *_: True)
    monkeypatch.setattr(layers, "varlen_attn", varlen_attention)
    ours = attention(query, key, value, None, packed_seq_params=packing)
    assert ours.shape == (16, 32)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [3, 50])
def test_rows_with_a_window_go_through_the_kernel_as_sequences_of_one_length(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(6, 3, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    attention = core_attention(ALONE, None, window)
    expected = attention(query, key, value, None)
    monkeypatch.setattr(CoreAttention, "_has_kernel", lambda *_: True)
    monkeypatch.setattr(layers, "varlen_attn", varlen_attention)
    ours = attention(query, key, value, None)
    assert ours.shape == (6, 3, 32)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def on_gpu(head_dim: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A tensor by what is asked of it."""
    return SimpleNamespace(is_cuda=True, dtype=dtype, size=lambda _: head_dim)


@pytest.mark.parametrize(
    ("query", "value", "softcap", "dropout", "takes"),
    [
        (on_gpu(128), on_gpu(128), None, 0.0, True),
        (on_gpu(64, torch.float16), on_gpu(64), None, 0.0, True),
        (torch.zeros(1, 1, 64, dtype=torch.bfloat16), torch.zeros(1, 1, 64), None, 0.0, False),  # on a CPU
        (on_gpu(128, torch.float32), on_gpu(128), None, 0.0, False),
        (on_gpu(192), on_gpu(128), None, 0.0, False),  # latent attention
        (on_gpu(512), on_gpu(512), None, 0.0, False),
        (on_gpu(12), on_gpu(12), None, 0.0, False),
        (on_gpu(128), on_gpu(128), 50.0, 0.0, False),
        (on_gpu(128), on_gpu(128), None, 0.1, False),
    ],
)
def test_which_attention_the_kernel_takes(
    query: Any, value: Any, softcap: float | None, dropout: float, takes: bool
) -> None:
    attention = core_attention(ALONE, None, None)
    attention.softcap, attention.dropout = softcap, dropout
    assert attention._has_kernel(query, value) is takes
