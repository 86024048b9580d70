"""Log-probs and entropy of one rank against hand arithmetic and a float64 softmax; tests/distributed has two ranks."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megappo.parallel.vocab import vocab_parallel_kl, vocab_parallel_log_probs


def one_rank(logits: Tensor, targets: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    settings = {"vocab_size": logits.shape[1], "temperature": 1.0, "chunk_tokens": 4, "with_entropy": True} | options
    return vocab_parallel_log_probs(logits, targets, tp_group=None, **settings)  # type: ignore[arg-type]


def test_two_words() -> None:
    # Odds 1 : 3, and, at temperature 1/2, 1 : 9.
    logits = torch.tensor([[0.0, math.log(3.0)]])
    log_probs, entropy = one_rank(logits, torch.tensor([1]))
    assert log_probs.item() == pytest.approx(math.log(0.75))
    assert entropy.item() == pytest.approx(0.562335, abs=1e-6)
    log_probs, entropy = one_rank(logits, torch.tensor([0]), temperature=0.5)
    assert log_probs.item() == pytest.approx(math.log(0.1))
    assert entropy.item() == pytest.approx(0.325083, abs=1e-6)


def test_padding_has_no_probability_and_no_gradient() -> None:
    logits = torch.tensor([[0.0, 0.0, 50.0, float("inf")]], requires_grad=True)
    log_probs, entropy = one_rank(logits, torch.tensor([0]), vocab_size=2)
    assert log_probs.item() == pytest.approx(math.log(0.5))
    assert entropy.item() == pytest.approx(math.log(2.0))
    (log_probs + entropy).backward()
    assert logits.grad is not None
    assert logits.grad.tolist() == [[0.5, -0.5, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_against_a_dense_softmax(dtype: torch.dtype, tolerance: float, chunk_tokens: int, with_entropy: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (2 * torch.randn(9, 64, dtype=torch.float64, generator=generator)).to(dtype).requires_grad_()
    targets = torch.randint(0, 50, (9,), generator=generator)
    weights = torch.randn(2, 9, dtype=torch.float64, generator=generator)
    log_probs, entropy = one_rank(
        logits, targets, vocab_size=50, temperature=0.7, chunk_tokens=chunk_tokens, with_entropy=with_entropy
    )
    (log_probs * weights[0] + (entropy * weights[1] if with_entropy else 0)).sum().backward()

    dense = logits.detach().double().requires_grad_()
    expected = (dense[:, :50] / 0.7).log_softmax(-1)
    expected_log_probs = expected.gather(1, targets[:, None])[:, 0]
    expected_entropy = -(expected.exp() * expected).sum(-1)
    (expected_log_probs * weights[0] + (expected_entropy * weights[1] if with_entropy else 0)).sum().backward()
    assert log_probs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert logits.grad is not None and dense.grad is not None and logits.grad.dtype == dtype
    # The inputs are equal to the last bit, so that only the gradient is rounded to bfloat16.
    assert (log_probs - expected_log_probs).abs().max() < min(tolerance, 1e-5)
    assert (logits.grad - dense.grad).abs().max() < tolerance
    if with_entropy:
        assert (entropy - expected_entropy).abs().max() < min(tolerance, 1e-5)


class LargestFloat32(TorchDispatchMode):
    """Elements of the largest float32 tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype == torch.float32:
            self.elements = max(self.elements, result.numel())
        return result


def test_float32_exists_for_one_chunk_at_a_time() -> None:
    logits = torch.randn(64, 32, dtype=torch.bfloat16, requires_grad=True)
    with LargestFloat32() as seen:
        log_probs, entropy = one_rank(logits, torch.zeros(64, dtype=torch.int64), chunk_tokens=8)
        (log_probs + entropy).sum().backward()
    assert seen.elements == 8 * 32


@pytest.mark.parametrize("with_kl", [False, True])
def test_named_rows_alone_are_read(with_kl: bool) -> None:
    """The others hold NaN, and have a gradient of 0."""
    generator = torch.Generator().manual_seed(1)
    rows, targets = torch.tensor([5, 0, 3]), torch.tensor([1, 2, 0])
    whole = torch.full((6, 4), torch.nan, dtype=torch.float64)
    whole[rows] = torch.randn(3, 4, dtype=torch.float64, generator=generator)
    reference = torch.randn(6, 4, dtype=torch.float64, generator=generator)

    def result(logits: Tensor, other: Tensor, named: Tensor | None) -> Tensor:
        if with_kl:
            return vocab_parallel_kl(
                logits, other, vocab_size=4, temperature=1.0, tp_group=None, chunk_tokens=2, rows=named
            )
        return torch.stack(one_rank(logits, targets, chunk_tokens=2, rows=named))

    inputs, selected = whole.clone().requires_grad_(), whole[rows].clone().requires_grad_()
    found, expected = result(inputs, reference, rows), result(selected, reference[rows], None)
    found.sum().backward()
    expected.sum().backward()
    assert torch.equal(found, expected)
    assert inputs.grad is not None and selected.grad is not None
    assert torch.equal(inputs.grad[rows], selected.grad)
    assert inputs.grad[[1, 2, 4]].eq(0).all()
