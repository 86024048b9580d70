"""Soft caps and windows of attention, by hand and against loops in float64."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megappo.engines.native.pieces import NormPieces
from megappo.models import scores
from megappo.models.layers import CoreAttention, rms_norm
from megappo.models.scores import softcapped, softcapped_attention


def test_a_soft_cap_bends_towards_the_cap() -> None:
    values = softcapped(torch.tensor([0.0, 1.0, -2.0, 1e6]), 2.0)
    assert values.tolist() == pytest.approx([0.0, 2 * math.tanh(0.5), -2 * math.tanh(1.0), 2.0])
    untouched = torch.tensor([3.0])
    assert softcapped(untouched, None) is untouched


def expected(query: Any, key: Any, value: Any, window: int, scale: float, cap: float | None) -> torch.Tensor:
    """[s, heads, d]: every query by itself; two query heads share a KV head."""
    rows = torch.zeros_like(query)
    for place in range(len(query)):
        for head in range(query.shape[1]):
            seen = range(max(0, place - window + 1), place + 1)
            scores = [scale * float(query[place, head] @ key[at, head // 2]) for at in seen]
            if cap is not None:
                scores = [cap * math.tanh(score / cap) for score in scores]
            total = sum(map(math.exp, scores))
            for score, at in zip(scores, seen, strict=True):
                rows[place, head] += math.exp(score) / total * value[at, head // 2]
    return rows


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("cap", [None, 0.7])
def test_core_attention_keeps_window_and_cap(window: int | None, cap: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(7, heads, 4, dtype=torch.float64, generator=generator) for heads in (4, 2, 2)
    )  # fmt: skip
    groups: Any = SimpleNamespace(cp=SimpleNamespace(size=lambda: 1))
    config: Any = SimpleNamespace(attention_dropout=0.0)
    attention = CoreAttention(config, 1, None, "self", softmax_scale=0.9, pg_collection=groups)  # type: ignore[arg-type]
    attention.window, attention.softcap = window, cap
    mixed = attention(query[:, None], key[:, None], value[:, None], None)
    wanted = expected(query, key, value, window or 7, 0.9, cap)
    assert torch.allclose(mixed, wanted.flatten(1)[:, None], atol=1e-12)
    # Two sequences of 3 and 4 tokens in one row see nothing of each other.
    packed: Any = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 3, 7]))
    mixed = attention(query, key, value, None, packed_seq_params=packed)
    parts = [expected(query[at], key[at], value[at], window or 7, 0.9, cap) for at in (slice(0, 3), slice(3, 7))]
    assert torch.allclose(mixed, torch.cat(parts).flatten(1), atol=1e-12)


@pytest.mark.parametrize("window", [None, 1, 5, 11])
@pytest.mark.parametrize("cap", [None, 0.7])
@pytest.mark.parametrize("num_queries", [23, 6])
def test_blocks_of_queries_give_what_all_of_them_give(
    window: int | None, cap: float | None, num_queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values, and gradients of all three; the queries are the last of 23 positions."""
    generator = torch.Generator().manual_seed(1)
    query, key, value, weights = (
        torch.randn(2, heads, length, 4, dtype=torch.float64, generator=generator)
        for heads, length in ((4, num_queries), (2, 23), (2, 23), (4, num_queries))
    )

    def all_of(block: int) -> list[torch.Tensor]:
        monkeypatch.setattr(scores, "BLOCK", block)
        given = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        mixed = scores.causal_attention(*given, 0.9, window, cap)
        return [mixed, *torch.autograd.grad((mixed * weights).sum(), given)]

    for name, ours, whole in zip(("mixed", "query", "key", "value"), all_of(5), all_of(512), strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-12, atol=1e-12, msg=name)
    last = expected(torch.cat([torch.zeros(2, 4, 23 - num_queries, 4), query], dim=2)[0].transpose(0, 1),
                    key[0].transpose(0, 1), value[0].transpose(0, 1), window or 23, 0.9, cap)  # fmt: skip
    torch.testing.assert_close(all_of(5)[0][0].transpose(0, 1), last[23 - num_queries :], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("window", "cap"), [(None, 3.0), (64, 3.0), (64, None)])
def test_nothing_of_tokens_times_tokens_is_kept_or_made(window: int | None, cap: float | None) -> None:
    """4 blocks: the largest tensor of a forward and backward pass has a block's queries times what they see."""
    tokens, heads = 4 * scores.BLOCK, 2
    given = [torch.randn(1, heads, tokens, 4, requires_grad=True) for _ in range(3)]
    with LargestTensor() as largest:
        scores.causal_attention(*given, None, window, cap).sum().backward()
    seen = tokens if window is None else scores.BLOCK + window - 1
    assert largest.numbers <= heads * scores.BLOCK * seen
    assert largest.numbers >= (heads if cap else 1) * scores.BLOCK * min(seen, scores.BLOCK)  # it sees the scores


class LargestTensor(TorchDispatchMode):
    """Watches every result of an operation, those of the backward pass too."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return made


def test_a_scale_of_none_is_that_of_the_head() -> None:
    query, visible = torch.tensor([[[1.0, 2.0, 0.0, 2.0]]]), torch.ones(1, 2, dtype=torch.bool)
    key, value = torch.stack([query[0], -query[0]], dim=1), torch.tensor([[[1.0], [0.0]]])
    score = 9 / 2
    first = 1 / (1 + math.exp(-2 * 3 * math.tanh(score / 3)))
    assert softcapped_attention(query, key, value, visible, None, 3.0).item() == pytest.approx(first)


def test_norms_times_one_plus_weight_are_computed_in_float32() -> None:
    hidden, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([0.0, 1.0])
    root = math.sqrt(12.5)
    assert rms_norm(hidden, weight, 0.0, is_zero_centered=True)[0].tolist() == pytest.approx([3 / root, 8 / root])
    assert rms_norm(hidden, weight, 0.0, is_zero_centered=False)[0].tolist() == pytest.approx([0.0, 4 / root])
    # 1 + 2⁻⁹ is 1 in bfloat16: rounded before the product, the weight would be lost.
    small = torch.full((2,), 2.0**-9, dtype=torch.bfloat16)
    many = torch.linspace(0.1, 4, 100)[:, None] * torch.tensor([3.0, 4.0])
    without = rms_norm(many.bfloat16(), torch.zeros_like(small), 1.0, is_zero_centered=True)
    assert not torch.equal(rms_norm(many.bfloat16(), small, 1.0, is_zero_centered=True), without)


def test_generation_layouts_read_the_kind_of_norm_from_the_configuration() -> None:
    for is_zero_centered in (True, False):
        config: Any = SimpleNamespace(layernorm_zero_centered_gamma=is_zero_centered)
        norm = NormPieces(config=config, hidden_size=2, eps=1e-6)
        norm.bind(SimpleNamespace(parameters={"n.weight": (torch.tensor([0.5, 2.0]),)}), None, "n")  # type: ignore[arg-type]
        hidden = torch.tensor([[1.0, 1.0]])
        assert norm(hidden)[0].tolist() == pytest.approx([1.5, 3.0] if is_zero_centered else [0.5, 2.0], abs=1e-5)
