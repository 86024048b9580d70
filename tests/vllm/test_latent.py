"""DeepSeek in vLLM's kernels for latent attention: the fused parameters of GPUs, written and bound directly."""

from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from tests.support.tiny_models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.vllm


def test_fused_parameters_follow_training(tmp_path: Path) -> None:
    model = tiny_model(
        tmp_path / "model", "deepseek_v3", vocab_size=100, hidden_size=128, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, q_lora_rank=24, kv_lora_rank=512, moe_intermediate_size=64,
    )  # fmt: skip
    tiny_tokenizer(model, vocab_size=100)
    result = run_ranks(
        "tests.vllm.programs.latent_kernels", "--model", model, "--export", tmp_path / "export", "--tp", 2,
        "--generation-tp", 2, "--weights", "direct", nproc=2, timeout=500, torchrun=True,
    )  # fmt: skip
    differences = result["differences"]
    assert max(differences[name] for name in ("imported", "update", "sampled")) < 1e-4
    assert result["changed"], "the update changes what is generated, or the test shows nothing"
    # By hand, a rank's copies: the down projections of both layers, and in the one with experts a half of each of the
    # 8, which training holds whole.
    down = 2 * (24 + 512 + 64) * 128 * 4
    report = result["report"]
    assert report["bytes_copied"] == down + 8 * 3 * (64 // 2) * 128 * 4
    assert (report["bytes_sent"], report["bytes_received"]) == (0, 0)
