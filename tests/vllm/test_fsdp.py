"""vLLM takes the weights of an actor that data-parallel ranks share."""

from pathlib import Path

import pytest

from tests.support.runs import metrics, succeed, write_run_experiment
from tests.support.tiny_models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.vllm


def test_vllm_has_the_log_probs_of_a_cut_actor(tmp_path: Path) -> None:
    """In both steps: the second has weights that were trained."""
    experiment = write_run_experiment(tmp_path)
    tiny_model(tmp_path / "model", "llama", tied=True, hidden_size=128, head_dim=32)
    tiny_tokenizer(tmp_path / "model")
    settings = ["actor.fsdp.enable=true", "rollout.engine=vllm", "hybrid.weights=load", "layout.dp=2"]
    settings += ["rollout.tensor_model_parallel_size=1", "trainer.total_steps=2", "data.val_files=[]"]
    succeed("train", experiment, *settings, "trainer.test_freq=0", "trainer.save_last=false")
    first, second = (line for line in metrics(tmp_path / "run") if line["step"])
    for line in (first, second):
        assert line["rollout/log_prob_diff_max"] < 1e-4
        # The whole parameters are there until they are sent.
        asleep, weights, awake = (line[f"hybrid/held_{point}_bytes"] for point in ("asleep", "weights", "awake"))
        assert weights > awake == asleep > 0
    assert second["actor/grad_norm"] != first["actor/grad_norm"]
