"""Float32 copies of bfloat16 gradients last for a step: their bytes by hand, and updates the same to the bit."""

from typing import Any

import pytest

from tests.distributed.programs.gradient_copies import CASES
from tests.support.ranks import run_ranks
from tests.support.tiny_models import tiny_model

HIDDEN, VOCABULARY = 32, 128
# Of 4 query and 2 KV heads of 8: q, k and v with biases, what attention gives back, two norms.
ATTENTION = (32 + 16 + 16) * (HIDDEN + 1) + HIDDEN * HIDDEN + 2 * HIDDEN
ENDS = 2 * VOCABULARY * HIDDEN + HIDDEN  # embedding, output layer, last norm
DENSE = ENDS + 4 * (ATTENTION + 3 * HIDDEN * 64)
# Router, shared expert of 24 rows and its gate, four experts of 16.
MOE = ENDS + 2 * (ATTENTION + 4 * HIDDEN + 3 * HIDDEN * 24 + HIDDEN + 4 * 3 * HIDDEN * 16)
# Rank 4 beside o [32, 32] and down [32, 64].
ADAPTERS = 4 * (4 * (32 + 32) + 4 * (64 + 32))

COPIED = {
    "dp2": DENSE,
    "dp2-all-reduce": 2 * DENSE,  # either rank steps them all
    "dp2-fp32": 0,
    "dp2-all-reduce-fp32": 0,
    "dp2-lora": ADAPTERS,
    "ep2": MOE,
    "pp2-vpp2": DENSE,
}
"""Parameters that the two ranks step together with a copy of the gradient."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("models")
    tiny_model(folder / "dense", "qwen2", num_layers=4)
    tiny_model(folder / "moe", "qwen2_moe")
    return dict(run_ranks("tests.distributed.programs.gradient_copies", "--models", folder, nproc=2))


@pytest.mark.parametrize("case", CASES)
def test_copies_last_for_a_step(results: dict[str, Any], case: str) -> None:
    ours, kept = results[case], results[f"{case}, by Megatron"]
    assert sum(ours["while stepping"]) == 4 * COPIED[case]
    assert ours["after"] == [0, 0]
    # Megatron keeps them where everything else has gone to the host, but for single numbers that come and go.
    assert sum(kept["resting"]) - sum(ours["resting"]) == pytest.approx(4 * COPIED[case], abs=64)


@pytest.mark.parametrize("case", CASES)
def test_updates_are_the_same_to_the_bit(results: dict[str, Any], case: str) -> None:
    assert results[case]["trained"] == results[f"{case}, by Megatron"]["trained"]
