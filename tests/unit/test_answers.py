"""How many ranks answer prompts together where no run says so: arithmetic on the sizes of public models."""

from pathlib import Path

import pytest

from megappo.config.grid import GenerationGrid, TrainingGrid
from megappo.models.families import FAMILIES
from megappo.models.families.published import PUBLISHED
from megappo.trainer.answers import replica_size, with_whole_replicas
from tests.support.experiments import small_experiment

QWEN3_30B_A3B = dict(PUBLISHED["qwen3-30b-a3b"])
QWEN2_57B_A14B = QWEN3_30B_A3B | {
    "model_type": "qwen2_moe", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_experts": 64, "moe_intermediate_size": 2560,
    "shared_expert_intermediate_size": 20480, "head_dim": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "training", "size", "replicas"),
    [
        (QWEN3_30B_A3B, TrainingGrid(tp=2, pp=2, dp=2), None, 2),  # on the shards as they lie
        (QWEN3_30B_A3B, TrainingGrid(tp=2, etp=2), None, 1),
        (QWEN3_30B_A3B, TrainingGrid(dp=8, ep=8), 8, 1),
        (QWEN3_30B_A3B, TrainingGrid(dp=16, ep=8), 8, 2),
        (QWEN3_30B_A3B, TrainingGrid(tp=2, dp=4, ep=8), 8, 1),
        (QWEN3_30B_A3B, TrainingGrid(tp=2, pp=2, dp=2, ep=2, etp=2), 8, 1),
        (QWEN3_30B_A3B, TrainingGrid(tp=2, dp=4, etp=4), 4, 2),
        (QWEN2_57B_A14B, TrainingGrid(dp=8, ep=8), 4, 2),  # 28 heads are not for 8 ranks
        (QWEN2_57B_A14B, TrainingGrid(pp=2, dp=4, ep=4), 4, 2),
    ],
)
def test_ranks_that_hold_all_experts_answer_together(
    config: dict[str, object], training: TrainingGrid, size: int | None, replicas: int
) -> None:
    shape = FAMILIES[str(config["model_type"])].shape(config)
    found = replica_size(shape, training)
    assert found == size
    if found is not None:
        assert GenerationGrid(training, found).num_replicas == replicas


def test_evaluations_take_that_size_where_the_experiment_leaves_it_open(tmp_path: Path) -> None:
    shape, training = FAMILIES["qwen3_moe"].shape(QWEN3_30B_A3B), TrainingGrid(dp=8, ep=8)
    for overrides, expected in (
        ((), 8),
        (("rollout.tensor_model_parallel_size=2",), 2),
        (("rollout.engine=vllm",), None),
    ):
        config = with_whole_replicas(small_experiment(tmp_path, *overrides), shape, training)
        assert config.rollout.tensor_model_parallel_size == expected
    as_it_lies = with_whole_replicas(small_experiment(tmp_path), shape, TrainingGrid(dp=8))
    assert as_it_lies.rollout.tensor_model_parallel_size is None
