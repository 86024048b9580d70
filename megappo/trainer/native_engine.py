"""The native engine on training shards, as they lie or in a layout of its own: for runs and for commands."""

from __future__ import annotations

from torch import nn

from megappo.data.tokenizer import Tokenizer
from megappo.engines.native_layout import NativeLayoutEngine
from megappo.engines.native_rollout import NativeRolloutEngine
from megappo.engines.rollout import RolloutEngine
from megappo.models.architecture import ModelSpec
from megappo.parallel.mesh import Mesh


def native_engine(
    model: nn.Module,
    spec: ModelSpec,
    mesh: Mesh,
    tokenizer: Tokenizer,
    *,
    tp: int | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    bucket_bytes: int,
    records_experts: bool = False,
    pipeline_micro_batches: int | None = None,
) -> RolloutEngine:
    """The engine around `model`, this rank's stage; replicas of `tp` ranks in a layout of their own, which has no
    stages for `pipeline_micro_batches`, None for the shards as they lie, which take nothing from `bucket_bytes`. A
    collective call."""
    if tp is None:
        return NativeRolloutEngine(
            model, spec.shape, mesh, decode=tokenizer.decode, eos_ids=tokenizer.eos_ids, max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens, records_experts=records_experts,
            pipeline_micro_batches=pipeline_micro_batches,
        )  # fmt: skip
    return NativeLayoutEngine(
        model, spec, mesh, tp=tp, decode=tokenizer.decode, eos_ids=tokenizer.eos_ids, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens, bucket_bytes=bucket_bytes, records_experts=records_experts,
    )  # fmt: skip
