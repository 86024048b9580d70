"""Log-prob, entropy and exact KL of a vocabulary over 1, 2 and 4 ranks, against float64 and the naive memory."""

import pytest

from tests.support.ranks import run_ranks

QUANTITIES = ("log-prob", "entropy", "exact KL")
# Values are float32 whatever the logits; gradients are rounded to the logits' type.
VALUE_LIMITS = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-5}
GRADIENT_LIMITS = {"float64": 1e-12, "float32": 5e-6, "bfloat16": 3e-2}
MEMORY_LIMIT = 0.25


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, float]]:
    """TP size → number → the largest of any rank."""
    found: dict[str, dict[str, float]] = run_ranks("tests.distributed.programs.vocab", nproc=4, timeout=120)
    return found


@pytest.mark.parametrize("tp", ["tp1", "tp2", "tp4"])
def test_sharded_vocabulary(results: dict[str, dict[str, float]], tp: str) -> None:
    numbers = results[tp]
    for dtype in VALUE_LIMITS:
        for name in QUANTITIES:
            value, gradient = numbers[f"{name} {dtype}"], numbers[f"gradient of {name} {dtype}"]
            print(f"\n{tp} {dtype:<9} {name:<9} error {value:.0e}, of its gradient {gradient:.0e}", end="")
            assert value <= VALUE_LIMITS[dtype]
            assert gradient <= GRADIENT_LIMITS[dtype]
    for name in ("log-prob and entropy", "exact KL"):
        ratio = numbers[f"memory {name}"]
        print(f"\n{tp} bfloat16  {name}: peak memory {ratio:.2f} of the naive version's", end="")
        assert ratio <= MEMORY_LIMIT
    print()
