"""A table of values: what a function gives beside what hand or float64 arithmetic gives, printed and compared."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Row:
    """One case: the function's numbers, the expected ones, and how far they may be apart (absolute + relative)."""

    name: str
    compute: Callable[[], Tensor]
    expected: Sequence[float] | float
    tolerance: float = 2e-6

    def found(self) -> list[float]:
        return [float(number) for number in self.compute().detach().double().flatten()]

    def wanted(self) -> list[float]:
        return [float(self.expected)] if isinstance(self.expected, int | float) else [float(x) for x in self.expected]

    def error(self) -> float:
        """Largest |found − expected| / max(|expected|, 1)."""
        found, wanted = self.found(), self.wanted()
        assert len(found) == len(wanted), f"{self.name}: {len(found)} numbers, expected {len(wanted)}"
        differences = [abs(ours - theirs) / max(abs(theirs), 1.0) for ours, theirs in zip(found, wanted, strict=True)]
        assert not any(difference != difference for difference in differences), f"{self.name}: NaN in {found}"
        return max(differences)

    def check(self) -> None:
        error = self.error()
        assert error <= self.tolerance, f"{self.name}: {self.found()}, expected {self.wanted()}: off by {error:.1e}"


def with_gradient(function: Callable[[Tensor], Tensor], at: Sequence[float]) -> Tensor:
    """The function's values at the points, then the gradient of their sum."""
    x = torch.tensor([list(at)], dtype=torch.float32, requires_grad=True)
    values = function(x)
    (gradient,) = torch.autograd.grad(values.sum(), x)
    return torch.cat([values.detach().flatten(), gradient.flatten()])


def print_table(title: str, rows: Sequence[Row]) -> None:
    """What `pytest -s` shows."""
    print(f"\n{title}: {len(rows)} rows\n{'case':<74}{'expected':<36}{'found':<36}{'error':>8}")
    for row in rows:
        print(f"{row.name:<74}{_short(row.wanted()):<36}{_short(row.found()):<36}{row.error():>8.0e}")


def _short(numbers: Sequence[float]) -> str:
    text = " ".join(f"{number:.6g}" for number in numbers)
    return text if len(text) <= 34 else text[:31] + "..."
