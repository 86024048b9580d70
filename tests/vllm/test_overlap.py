"""vLLM takes the weights of an actor whose data-parallel ranks gather them in the next forward pass."""

from pathlib import Path

import pytest

from tests.support.parity import OVERLAP
from tests.support.runs import metrics, succeed, write_run_experiment
from tests.support.tiny_models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("weights", ["load", "auto"])
def test_vllm_has_whole_weights(tmp_path: Path, weights: str) -> None:
    """In both steps: the second has weights that were trained, and half of them by the other rank."""
    experiment = write_run_experiment(tmp_path)
    tiny_model(tmp_path / "model", "llama", tied=True, hidden_size=128, head_dim=32)
    tiny_tokenizer(tmp_path / "model")
    settings = [*OVERLAP.split(","), "rollout.engine=vllm", f"hybrid.weights={weights}", "layout.dp=2"]
    settings += ["rollout.tensor_model_parallel_size=1", "trainer.total_steps=2", "data.val_files=[]"]
    settings += ["actor.offload.optimizer=true", "trainer.test_freq=0", "trainer.save_last=false"]
    succeed("train", experiment, *settings)
    first, second = (line for line in metrics(tmp_path / "run") if line["step"])
    for line in (first, second):
        assert line["rollout/log_prob_diff_max"] < 1e-4
    assert second["actor/grad_norm"] != first["actor/grad_norm"]
