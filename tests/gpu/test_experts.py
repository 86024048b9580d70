"""Grouped matrix products of experts on a GPU, against one product an expert in float64. `make test-gpu`."""

import pytest
import torch
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine"),
]


def one_by_one(tokens: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    parts = zip(tokens.split(counts), weight, strict=True)
    return torch.cat([part @ matrix.T for part, matrix in parts])


@pytest.mark.parametrize("rows", [192, 90])  # 90 is no multiple of 8: one product an expert here too
@pytest.mark.parametrize("counts", [[0, 300, 1, 0, 699, 0], [1000, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
def test_products_and_gradients(rows: int, counts: list[int]) -> None:
    from megappo.models.experts import grouped_product

    generator = torch.Generator("cuda").manual_seed(0)
    spoiled = torch.full((1 << 28,), torch.nan, device="cuda")
    del spoiled  # memory that the kernels get, so that what they leave unwritten is NaN

    def random(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator, device="cuda")
        return values.to(torch.bfloat16).requires_grad_()

    tokens, weight, grad = random(sum(counts), 128), random(6, rows, 128), random(sum(counts), rows)
    output = grouped_product(tokens, weight, torch.tensor(counts))
    output.backward(grad.detach())

    exact = [tensor.detach().double().requires_grad_() for tensor in (tokens, weight)]
    expected = one_by_one(*exact, counts)
    expected.backward(grad.detach().double())
    for ours, theirs in ((output, expected), (tokens.grad, exact[0].grad), (weight.grad, exact[1].grad)):
        assert ours is not None and theirs is not None
        assert (ours - theirs).norm() <= 4e-3 * theirs.norm()  # bfloat16 has 8 bits
    assert weight.grad is not None
    for expert, count in enumerate(counts):
        assert count > 0 or not weight.grad[expert].any(), f"expert {expert} has no token, and a gradient"
