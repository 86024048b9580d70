"""How much of a switch is under way at once: what the plan states, held against the transfers of every rank."""

import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from megappo.engines.hybrid.account import account_of
from megappo.engines.hybrid.audit import Auditor, PlanError
from megappo.engines.hybrid.kinds import Places
from megappo.engines.hybrid.native import PieceDestination
from megappo.engines.hybrid.plan import Planner
from megappo.engines.hybrid.targets import NativeTargets
from megappo.engines.hybrid.transfers import ExpertRun, Lines, Way
from megappo.engines.hybrid.weights import GenerationWeights
from megappo.engines.vllm.direct import DirectTransfer
from megappo.errors import ConfigError
from tests.unit.test_mixed_types import BIAS
from tests.unit.test_reshard_plan import planner
from tests.unit.test_vllm_latent import LATENT
from tests.unit.test_vllm_latent import plan as latent_plan

DENSE, VOCABULARY = 4 * (512 * 128 + 128 * 256 + 3 * 128 * 256) * 2, 2 * 1024 * 128 * 2  # bytes of tiny-llama


def under_way(plan: Planner, rank: int) -> list[int]:
    """Bytes that a rank receives and sends in each bucket."""
    sizes: Counter[int] = Counter()
    moved = [transfer for transfer in plan.receives(rank) if transfer.way is Way.GATHER]
    for transfer in [*moved, *plan.sends(rank)]:
        line_bytes, rest = divmod(transfer.nbytes, transfer.lines)
        assert rest == 0
        for place, bucket in enumerate(transfer.buckets):
            blocks = transfer.blocks(place)
            sizes[bucket] += sum((each.last - each.first) * (each.stop - each.start) for each in blocks) * line_bytes
    assert sizes.total() == sum(transfer.nbytes for transfer in [*moved, *plan.sends(rank)])
    return [sizes[bucket] for bucket in range(plan.buckets.count)]


@pytest.mark.parametrize(
    ("shape", "layout", "generation", "engine", "bucket_bytes"),
    [
        ("tiny-llama", "1-2-1", 1, "native", 1 << 12),
        ("tiny-llama", "1-4-1", 2, "vllm", 1 << 14),
        ("tiny-llama", "2-2-2", 4, "native", 1 << 16),
        ("tiny-llama", "2-2-1", 4, "vllm", 50_000),
        ("tiny-qwen3", "4-1-2", 2, "native", 77_777),
        ("tiny-qwen2", "1-8-1", 8, "vllm", 1 << 12),  # several ranks take the same KV heads
        ("tiny-qwen3-moe", "1-2-2@ep4", 2, "native", 1 << 14),
        ("tiny-qwen3-moe", "2-2-2@ep2,etp2", 2, "native", 1 << 14),  # parts end inside of an expert
        ("tiny-qwen3-moe", "2-1-4@ep4", 4, "vllm", 1 << 20),
        ("qwen2.5-7b", "4-2-1", 1, "native", 256 << 20),  # a rank of the first stage sends its rows to seven others
        ("qwen2.5-1.5b", "4-2-1", 1, "native", 64 << 20),  # tied: two stages hold the embedding
    ],
)
def test_no_rank_has_more_under_way_than_a_bucket(
    shape: str, layout: str, generation: int, engine: str, bucket_bytes: int
) -> None:
    plan = planner(shape, layout, generation, engine, bucket_bytes)
    assert max(plan.buckets.sizes) <= bucket_bytes and plan.extra_bytes <= 2 * bucket_bytes
    ranks = [under_way(plan, rank) for rank in range(plan.training.world_size)]
    for sizes in ranks:
        assert all(size <= most for size, most in zip(sizes, plan.buckets.sizes, strict=True))
        assert all(sum(sizes[number : number + 2]) <= plan.extra_bytes for number in range(len(sizes)))
    # What is stated is not far above what the busiest rank has.
    assert max(max(sizes) for sizes in ranks) >= 0.7 * max(plan.buckets.sizes)


def test_stated_bytes_by_hand() -> None:
    """Each of two ranks receives the half that it lacks and sends its own, in one bucket, or in two that are equal."""
    whole = DENSE + VOCABULARY
    plan = planner("tiny-llama", "1-2-1", 1, bucket_bytes=1 << 21)
    assert plan.buckets.sizes == (whole,) and plan.extra_bytes == whole
    # The embedding and the output layer first, in 8 parts of 65,536 bytes; then 229,376 for each of 4 layers.
    plan = planner("tiny-llama", "1-2-1", 1, bucket_bytes=1 << 16)
    assert plan.buckets.sizes[:8] == (VOCABULARY // 8,) * 8
    assert sum(plan.buckets.sizes) == whole and plan.extra_bytes == 2 << 16
    assert planner("tiny-llama", "1-2-1", 2).extra_bytes == 0
    assert "1-2-1 → replicas of 1, in " in plan.description
    assert plan.description.endswith("a switch takes at most 131,072 bytes beyond the parameters on any rank")
    to_vllm = object.__new__(DirectTransfer)
    to_vllm.planner = plan
    assert to_vllm.description.startswith("directly: ") and to_vllm.description.endswith(f"; {plan.description}")


def test_a_bucket_that_holds_no_row_to_each_peer_is_refused() -> None:
    """A row of the embedding, 256 bytes, is received from 3 ranks and sent to 3; one of the output layer as well."""
    with pytest.raises(ConfigError, match=r"hybrid.bucket_mib: .* is 3,072 bytes at once, more than the 3,071 of a"):
        planner("tiny-llama", "1-4-1", 1, bucket_bytes=3071)
    assert max(planner("tiny-llama", "1-4-1", 1, bucket_bytes=3072).buckets.sizes) == 3072


@pytest.mark.parametrize("count", [1, 3, 4, 7, 40])
def test_parts_of_experts_are_all_of_their_lines(count: int) -> None:
    """5 experts of 8 lines, in parts that need not end where an expert does."""
    (first, *_) = [each for each in planner("tiny-qwen3-moe", "1-1-2@ep2", 1).receives(0) if each.experts]
    transfer = replace(first, experts=ExpertRun(2, 5, 2, 0), length=8, axis=0, buckets=range(9, 9 + count))
    seen: list[int] = []
    for place in range(count):
        blocks = list(transfer.blocks(place))
        assert len(blocks) <= 3
        lines = [
            expert * 8 + line
            for block in blocks
            for expert in range(block.first, block.last)
            for line in range(block.start, block.stop)
        ]
        assert len(lines) <= -(-40 // count)
        seen += lines
    assert seen == list(range(40))
    if count == 3:
        assert list(transfer.blocks(1)) == [Lines(1, 2, 5, 8), Lines(2, 3, 0, 8), Lines(3, 4, 0, 2)]


def test_planning_4096_ranks_takes_a_rank_less_than_a_second() -> None:
    start = time.process_time()  # of this process alone: the machine may be busy
    plan = planner("deepseek-v3", "16-8-32@ep64", 32, bucket_bytes=256 << 20)
    assert plan.training.world_size == 4096
    sizes = under_way(plan, 4095)
    assert time.process_time() - start < 1
    assert 0 < max(sizes) <= max(plan.buckets.sizes) <= 256 << 20


def test_a_bias_of_experts_counts_four_bytes_an_element() -> None:
    """8 experts' in the one layer that has them, in a model of 2 bytes an element."""
    plan = latent_plan("deepseek_v3", LATENT)
    bytes_of = {each.source: each.nbytes for each in plan.receives(0) if each.layer == 1}
    assert bytes_of[BIAS] == 8 * 4
    assert bytes_of["decoder.layers.{layer}.mlp.router.weight"] == 8 * 64 * 2
    held = account_of(plan, 0)
    assert held.total.training == held.total.aliased + held.total.copied, "every byte of training is generated with"


def drop_rows(monkeypatch: pytest.MonkeyPatch, shard: int) -> None:
    """Has the plans made from here on forget the vocabulary rows of a training shard."""
    runs = Places.runs

    def without(self: Places, *arguments: Any) -> Any:
        for row, run in runs(self, *arguments):
            if not (run.kind.rule.is_vocabulary and run.shard == shard):
                yield row, run

    monkeypatch.setattr(Places, "runs", without)


@pytest.mark.parametrize("shard", [0, 1])
def test_lost_rows_of_the_vocabulary_are_found(shard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both by the check of a plan and when the pieces go to the engine."""
    plan = planner("tiny-llama", "1-2-1", 1)
    Auditor(plan).check(0, list(plan.receives(0)))
    fill(plan)
    drop_rows(monkeypatch, shard)
    plan = planner("tiny-llama", "1-2-1", 1)
    with pytest.raises(PlanError, match=r"embedding.word_embeddings.weight, layer None: .* are not all of its rows"):
        Auditor(plan).check(0, list(plan.receives(0)))
    lost = "0 to 512" if shard == 0 else "512 to 1000"  # of 1,024 with padding
    with pytest.raises(AssertionError, match=f"rows {lost} of embedding.word_embeddings.weight came from nowhere"):
        fill(plan)


def fill(plan: Planner) -> GenerationWeights:
    """The weights of rank 0, whose every piece has memory of its own."""
    assert isinstance(plan.targets, NativeTargets)
    destination, weights = PieceDestination(torch.bfloat16, torch.device("cpu")), GenerationWeights()
    for transfer in plan.receives(0):
        destination.view(transfer)
    destination.fill(weights, plan.targets.of(0), plan.kinds)
    return weights


def test_plans_are_made_without_torch() -> None:
    """With their packages: the contract of import-linter does not see what a package imports."""
    modules = "account, audit, plan, layout_text"
    code = (
        f"import sys; from megappo.engines.hybrid import {modules}; import megappo.engines.vllm.targets; "
        "sys.exit(bool({'torch', 'megatron', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
