"""Groups chosen from several lots are dealt over ranks, on several layouts: what each of them gets, and how many bytes.

Every sample and every score is a function of its lot and place, so that a rank knows what it must get.
"""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

import argparse
import dataclasses
import json
import os
import random
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megappo.config.layout import LayoutConfig
from megappo.experience.sample import Prompt, RolloutSample
from megappo.parallel.collectives import gather_objects
from megappo.parallel.mesh import Mesh, start_mesh, stop_mesh
from megappo.planner.batch import BatchPlan
from megappo.rewards.reward import FailedReward, ScoredBatch
from megappo.trainer.collect import Collected, dealt_again
from megappo.workers.reward import ScoredSamples

LAYOUTS = {4: {"dp4": (1, 1), "tp2 dp2": (2, 1), "pp2 dp2": (1, 2), "tp2 pp2": (2, 2)}, 3: {"dp3": (1, 1)}}
N = 2
CHOSEN = [(0, 5), (0, 1), (1, 0), (1, 2), (2, 3), (2, 4)]
TEXT = 20_000


def plan_of(dp: int) -> BatchPlan:
    nothing: Any = None
    return BatchPlan(prompts=len(CHOSEN), n=N, dp=dp, block=1, actor=nothing, critic=nothing)


def sample_of(lot: int, position: int) -> RolloutSample:
    draw = random.Random(f"{lot} {position}")
    text = "".join(draw.choice("abcäöü") for _ in range(TEXT // 2))
    prompt = Prompt(100 * lot + position // N, "made", (4, 5, lot), "x", extra={"lot": lot})
    return RolloutSample(prompt, position, position % N, (6, 7), (-draw.random(), -draw.random()), text, "stop")


def scored_of(lot: int, positions: Sequence[int]) -> ScoredSamples:
    """A lot has parts that others lack, the middle one rewards of tokens, the last one no rule."""
    scores = [lot + position / 16 for position in positions]
    parts = {"all": scores} | ({f"of {lot}": [-score for score in scores]} if lot else {})
    failed = [
        FailedReward(row, "all", f"{lot} {position}") for row, position in enumerate(positions) if position % 3 == 0
    ]
    tokens = [(score, 0.5) for score in scores] if lot == 1 else None
    right = [position % 2 == 0 for position in positions] if lot < 2 else None
    details = [{"all": {"seen": position}} for position in positions]
    return ScoredSamples(ScoredBatch(scores, parts, details, failed, tokens), right)


def expected(positions: Sequence[int]) -> Collected:
    """What stands at positions of the step, each looked up by itself."""
    nan = float("nan")
    origins = [(CHOSEN[position // N][0], CHOSEN[position // N][1] * N + position % N) for position in positions]
    samples = [
        dataclasses.replace(sample_of(*origin), position=position)
        for origin, position in zip(origins, positions, strict=True)
    ]
    scores = [lot + place / 16 for lot, place in origins]
    parts = {
        "all": scores,
        "of 1": [-score if lot == 1 else nan for (lot, _), score in zip(origins, scores, strict=True)],
        "of 2": [-score if lot == 2 else nan for (lot, _), score in zip(origins, scores, strict=True)],
    }
    batch = ScoredBatch(
        scores,
        parts,
        [{"all": {"seen": place}} for _, place in origins],
        [FailedReward(row, "all", f"{lot} {place}") for row, (lot, place) in enumerate(origins) if place % 3 == 0],
        [(score, 0.5) if lot == 1 else None for (lot, _), score in zip(origins, scores, strict=True)],
    )
    return Collected(samples, ScoredSamples(batch, [lot < 2 and place % 2 == 0 for lot, place in origins]))


def run_case(mesh: Mesh, moved: dict[str, int]) -> dict[str, Any]:
    plan = plan_of(mesh.dp)
    positions = plan.positions_of(mesh.dp_rank)
    lots = [
        Collected([sample_of(number, position) for position in positions], scored_of(number, positions))
        for number in range(3)
    ]
    moved.update(received=0, gathered=0)
    found = dealt_again(lots, CHOSEN, plan, mesh)
    received, gathered = moved["received"], moved["gathered"]
    own = sum(len(sample.text.encode()) for sample in found.samples)
    return {
        "is_right": repr(found) == repr(expected(positions)),  # as text, for NaN is not equal to itself
        "positions": [sample.position for sample in found.samples],
        "own": own,
        "received": received,
        "gathered": gathered,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    moved: dict[str, int] = {"received": 0, "gathered": 0}
    all_to_all, gather = dist.all_to_all_single, dist.all_gather_object

    def counted(output: Any, *rest: Any, **options: Any) -> Any:
        moved["received"] += output.nbytes
        return all_to_all(output, *rest, **options)

    def counted_gather(*rest: Any, **options: Any) -> Any:
        moved["gathered"] += 1
        return gather(*rest, **options)

    dist.all_to_all_single, dist.all_gather_object = counted, counted_gather
    results: dict[str, Any] = {}
    for name, (tp, pp) in LAYOUTS[int(os.environ["WORLD_SIZE"])].items():
        mesh = start_mesh(LayoutConfig(tp=tp, pp=pp), seed=0, timeout=timedelta(seconds=60))
        results[name] = gather_objects(run_case(mesh, moved), mesh.world_group)
        parallel_state.destroy_model_parallel()
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(results))
    stop_mesh()


if __name__ == "__main__":
    main()
