"""Rollouts as rows of a samples file: what was asked, what was answered, what it was worth."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import Any

from megappo.experience.sample import RolloutSample
from megappo.parallel.collectives import gather_objects
from megappo.parallel.mesh import Mesh
from megappo.workers.reward import ScoredSamples


def gathered_rows(
    samples: Sequence[RolloutSample], scored: ScoredSamples, mesh: Mesh, limit: int
) -> list[dict[str, Any]]:
    """Rows of up to `limit` samples in the order of the step, from all data-parallel ranks alike. A collective call."""
    share = -(-limit // mesh.dp) if mesh.is_group_leader else 0
    parts = gather_objects(
        [_row(samples, scored, index) for index in range(min(share, len(samples)))], mesh.world_group
    )
    return sorted((row for part in parts for row in part), key=lambda row: row["position"])[:limit]


def _row(samples: Sequence[RolloutSample], scored: ScoredSamples, index: int) -> dict[str, Any]:
    sample = samples[index]
    return {
        "position": sample.position,
        "sample": sample.sample,
        "source": sample.prompt.source,
        "index": sample.prompt.index,
        "prompt": sample.prompt.text,
        "response": sample.text,
        "answer": sample.prompt.answer,
        "score": scored.batch.totals[index],
        "parts": {name: value for name, values in scored.batch.parts.items() if not isnan(value := values[index])},
        "details": scored.batch.details[index],
        "prompt_tokens": len(sample.prompt.token_ids),
        "response_tokens": len(sample.response_ids),
        "log_prob": sum(sample.rollout_log_probs),
        "finish_reason": sample.finish_reason,
    }
