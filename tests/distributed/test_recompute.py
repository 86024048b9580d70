"""Recompute keeps fewer activations, by as many bytes as can be counted by hand, and changes no gradient."""

from typing import Any

import pytest

from tests.distributed.programs.recompute import BATCH, LENGTH
from tests.support.ranks import run_ranks
from tests.support.tiny_models import tiny_model

HIDDEN = 32
LAYER_INPUT = LENGTH * BATCH * HIDDEN * 4
"""Bytes of the one tensor of a recomputed layer that has to be kept: [s, b, hidden] float32."""

ROPE_TABLE = LENGTH * HIDDEN // 4 * 4
"""Bytes of the angles of a head's rotations, another input of recomputed layers, which all of them share."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("recompute")
    models = [tiny_model(folder / str(layers), num_layers=layers, hidden_size=HIDDEN) for layers in (2, 4)]
    return dict(run_ranks("tests.distributed.programs.recompute", "--models", *models, nproc=1))


@pytest.fixture
def found(results: dict[str, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """By the number of layers of a llama model: what each kind of recompute keeps."""
    return {layers: results[str(layers)] for layers in (2, 4)}


def a_layer(found: dict[int, dict[str, Any]], case: str) -> float:
    """Bytes that one more layer keeps."""
    return float(found[4][case]["bytes"] - found[2][case]["bytes"]) / 2


def test_full_recompute_keeps_the_inputs_of_layers_alone(found: dict[int, dict[str, Any]]) -> None:
    assert a_layer(found, "uniform-1") == LAYER_INPUT
    assert a_layer(found, "uniform-2") == LAYER_INPUT / 2
    # Layers beyond those of the block keep everything.
    assert a_layer(found, "block-1") == a_layer(found, "block-2") == a_layer(found, "none")
    whole, first, both = (found[2][case]["bytes"] for case in ("none", "block-1", "block-2"))
    saved = a_layer(found, "none") - LAYER_INPUT
    assert whole - first == saved - ROPE_TABLE and first - both == saved


def test_selective_recompute_keeps_fewer(found: dict[int, dict[str, Any]]) -> None:
    everything, tokens = a_layer(found, "none"), LENGTH * BATCH
    # An mlp of 2 · hidden rows keeps the gate and up rows, and their product; their input is kept by the norm already.
    assert everything - a_layer(found, "mlp") >= tokens * 4 * (4 + 2) * HIDDEN
    assert everything - a_layer(found, "layernorm") >= 2 * LAYER_INPUT
    assert everything - a_layer(found, "core_attn") > 0


@pytest.mark.parametrize("case", ["core_attn", "mlp", "uniform-1", "uniform-2", "block-1", "block-2"])
def test_gradients_are_the_same_bit_for_bit(found: dict[int, dict[str, Any]], case: str) -> None:
    for layers in (2, 4):
        assert found[layers][case]["gradients"] == found[layers]["none"]["gradients"]
        assert found[layers][case]["random_state_kept"], "a backward pass left another random state"


def test_norms_that_are_made_again_add_their_gradients_in_another_order(found: dict[int, dict[str, Any]]) -> None:
    for layers in (2, 4):
        pairs = zip(found[layers]["layernorm"]["gradients"], found[layers]["none"]["gradients"], strict=True)
        for ours, theirs in pairs:
            size = max(map(abs, theirs))
            assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) <= 1e-6 * size


def test_layers_learn_behind_a_frozen_embedding(results: dict[str, dict[str, Any]]) -> None:
    ours, theirs = results["frozen"]["uniform-1"], results["frozen"]["none"]
    assert ours == theirs and ours.count(None) == 1
