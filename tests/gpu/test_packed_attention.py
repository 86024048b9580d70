"""Attention of packed sequences in one call on a GPU, against one after another in float64. `make test-gpu`."""

import pytest
import torch
from torch import Tensor

from tests.support.attention import ALONE, core_attention, packing_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine"),
]
LENGTHS = (1, 2, 63, 700, 64, 130)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(12, 2, 128), (6, 6, 64)])
def test_outputs_and_gradients(heads: int, kv_heads: int, head_dim: int, window: int | None) -> None:
    generator = torch.Generator("cuda").manual_seed(0)

    def random(count: int) -> Tensor:
        values = torch.randn(sum(LENGTHS), count, head_dim, generator=generator, device="cuda")
        return values.to(torch.bfloat16).requires_grad_()

    given = [random(heads), random(kv_heads), random(kv_heads)]
    attention, packing = core_attention(ALONE, None, window), packing_of(LENGTHS, "cuda")
    assert attention._has_kernel(given[0], given[2])
    grad = torch.randn(sum(LENGTHS), heads * head_dim, generator=generator, device="cuda").to(torch.bfloat16)
    output = attention(*given, None, packed_seq_params=packing)
    output.backward(grad)
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    expected = attention(*exact, None, packed_seq_params=packing)
    expected.backward(grad.double())
    for ours, theirs in ((output, expected), *((a.grad, b.grad) for a, b in zip(given, exact, strict=True))):
        assert ours is not None and theirs is not None
        assert (ours - theirs).norm() <= 6e-3 * theirs.norm()  # bfloat16 has 8 bits

    changed = [tensor.detach().clone() for tensor in given]
    start = sum(LENGTHS[:3])
    for tensor in changed:
        tensor[start : start + LENGTHS[3]] += 1
    again = attention(*changed, None, packed_seq_params=packing)
    own = torch.zeros(sum(LENGTHS), dtype=torch.bool, device="cuda")
    own[start : start + LENGTHS[3]] = True
    assert torch.equal(again[~own], output[~own]) and not torch.equal(again[own], output[own])


def test_padded_rows_with_a_window_go_through_the_kernel() -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    given = [
        torch.randn(700, 3, heads, 64, generator=generator, device="cuda").to(torch.bfloat16).requires_grad_()
        for heads in (6, 2, 2)
    ]
    attention = core_attention(ALONE, None, 100)
    grad = torch.randn(700, 3, 6 * 64, generator=generator, device="cuda").to(torch.bfloat16)
    output = attention(*given, None)
    output.backward(grad)
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    expected = attention(*exact, None)
    expected.backward(grad.double())
    for ours, theirs in ((output, expected), *((a.grad, b.grad) for a, b in zip(given, exact, strict=True))):
        assert ours is not None and theirs is not None
        assert (ours - theirs).norm() <= 6e-3 * theirs.norm()
