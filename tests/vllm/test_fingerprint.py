"""Every element of a model numbered, moved directly into vLLM's parameters on strided ranks, and looked for there."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.fingerprints import number_elements
from tests.support.ranks import run_ranks
from tests.support.tiny_models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """1-4-1 → replicas of 2: heads of 32, a vocabulary with padding, biases."""
    folder = tmp_path_factory.mktemp("fingerprint") / "model"
    number_elements(tiny_model(folder, "qwen2", vocab_size=131, hidden_size=128, num_heads=4, num_kv_heads=2))
    tiny_tokenizer(folder, 131)
    return run_ranks(
        "tests.vllm.programs.fingerprint", "--model", folder, "--tp", 4, "--generation-tp", 2, nproc=4, torchrun=True
    )


def test_every_element_is_where_vllm_computes_with_it(ranks: list[dict[str, Any]]) -> None:
    assert [rank["group"] for rank in ranks] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [rank["wrong"] for rank in ranks] == [[], [], [], []]


def test_bytes_by_hand(ranks: list[dict[str, Any]]) -> None:
    """A rank of 4 trains 1/4 and generates 1/2 of every matrix: half of that is its own, half comes from another rank;
    norms are aliased. H 128, F 256, (4 + 2 · 2) · 32 = 256 rows of q, k, v with biases, 192 rows of vocabulary twice.
    """
    layer = 256 * 128 + 256 + 128 * 128 + 3 * 256 * 128
    halves = (2 * layer + 2 * 192 * 128) // 2 * 4  # bytes of float32
    for rank in ranks:
        assert rank["copied"] == rank["received"] == halves // 2
        assert rank["aliased"] == (2 * 2 + 1) * 128 * 4


def test_a_spoiled_tensor_is_named_and_the_next_switch_repairs_it(ranks: list[dict[str, Any]]) -> None:
    assert [rank["spoiled"] for rank in ranks] == [None, "model.layers.1.self_attn.qkv_proj.weight", None, None]
    assert [rank["named"] for rank in ranks] == [None, f"{ranks[1]['spoiled']} (off by 0.5 at most)", None, None]
    assert [rank["repaired"] for rank in ranks] == [None] * 4


def test_replicas_agree(ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    assert all(rank["tokens"] == ranks[0]["tokens"] for rank in ranks)
    for rank in ranks:
        for ours, theirs in zip(rank["log_probs"], ranks[0]["log_probs"], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)
