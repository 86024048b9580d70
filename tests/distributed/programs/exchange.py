"""The rollout worker with a made-up engine, on several training layouts and replica shapes of four ranks.

Each response is a function of the request alone, so that every rank knows what it must receive. Rank 0 writes what all
ranks saw; what is right is not here.
"""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

import argparse
import json
import random
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megappo.config.layout import LayoutConfig
from megappo.engines.rollout import (
    Completion,
    GenerationRequest,
    HeldBytes,
    Progress,
    Replicas,
    SamplingParams,
    SyncReport,
)
from megappo.errors import DataError, UserError
from megappo.experience.sample import Prompt, RolloutSample
from megappo.parallel.mesh import Mesh, start_mesh, stop_mesh
from megappo.trainer.experience_metrics import sync_metrics
from megappo.workers.rollout import RolloutWorker, noise_key

CASES = {
    "tp2 dp2, own groups": (2, 1, [[0, 1], [2, 3]]),
    "tp2 dp2, four of one": (2, 1, [[0], [1], [2], [3]]),
    "tp2 dp2, one of four": (2, 1, [[0, 2, 1, 3]]),
    "tp2 dp2, strided pairs": (2, 1, [[0, 2], [1, 3]]),
    "dp4, pairs": (1, 1, [[0, 1], [2, 3]]),
    "dp4, uneven": (1, 1, [[0, 1, 2], [3]]),
    "pp2 dp2, pairs of a stage": (1, 2, [[0, 1], [2, 3]]),
    "tp2 pp2, strided pairs": (2, 2, [[0, 2], [1, 3]]),
    "tp4, four of one": (4, 1, [[0], [1], [2], [3]]),
}
NUM_SAMPLES = 3
TEXTS = ("", "plain", "Grüße", "数学 ", "🙂\n", "\ud800")  # the last is half of a pair, which a broken decoder may give


def response(request: GenerationRequest, max_tokens: int) -> Completion:
    """Uneven, sometimes empty; log-probs that float32 does not hold."""
    draw = random.Random(repr((request.prompt_ids, request.noise_key)))
    length = draw.choice((0, 1, draw.randint(2, max_tokens)))
    return Completion(
        token_ids=tuple(draw.randrange(150_000) for _ in range(length)),
        log_probs=tuple(-draw.random() for _ in range(length)),
        text="".join(draw.choice(TEXTS) for _ in range(length)),
        finish_reason=draw.choice(("stop", "length")),
    )


class MadeUpEngine:
    """Answers requests of its replica at once, and remembers them; refuses prompts that begin with `refused`."""

    def __init__(self, replicas: Replicas, refused: int | None = None) -> None:
        self.replicas = replicas
        self.refused = refused
        self.seen: list[GenerationRequest] = []

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParams, progress: Progress | None = None
    ) -> list[Completion]:
        for request in requests:
            if request.prompt_ids[0] == self.refused:
                raise DataError(f"prompt {request.prompt_ids[0]} is too long")
        self.seen += requests
        if progress is not None:
            progress(len(requests), len(requests))
        return [response(request, sampling.max_tokens) for request in requests]


def prompts_of(count: int) -> list[Prompt]:
    """Of 1 to 30 tokens; the first token is the prompt's number."""
    lengths = [1 + 7 * number % 30 for number in range(count)]
    return [Prompt(number, "made", tuple(range(number, number + length)), "") for number, length in enumerate(lengths)]


def positions_of(mesh: Mesh, num_prompts: int, kind: str) -> list[int]:
    """This data-parallel rank's positions: a run of them as in training, every dp-th prompt as in an evaluation."""
    total = num_prompts * NUM_SAMPLES
    if kind == "run":
        return list(range(total))[mesh.dp_rank * total // mesh.dp : (mesh.dp_rank + 1) * total // mesh.dp]
    mine = range(mesh.dp_rank, num_prompts, mesh.dp)
    return [prompt * NUM_SAMPLES + sample for prompt in mine for sample in range(NUM_SAMPLES)]


def run_case(mesh: Mesh, replicas: Replicas, received: list[int]) -> dict[str, Any]:
    """What this rank saw, for few and for many prompts."""
    sampling = SamplingParams(max_tokens=40)
    results: dict[str, Any] = {}
    for num_prompts, kind in ((16, "run"), (16, "every"), (3, "every"), (4, "run")):
        engine, told = MadeUpEngine(replicas), []
        worker = RolloutWorker(engine, sampling, mesh, num_samples=NUM_SAMPLES, seed=5)  # type: ignore[arg-type]
        prompts, received[:] = prompts_of(num_prompts), []
        positions = positions_of(mesh, num_prompts, kind)
        samples = worker.generate(prompts, positions, 9, lambda done, total, told=told: told.append((done, total)))
        results[f"{num_prompts} {kind}"] = {
            "positions": positions,
            "is_right": [is_right(sample, prompts, engine.replicas) for sample in samples],
            "sampled": [sample.position for sample in samples],
            "bytes": sum(received),
            "expected_bytes": sum(own_bytes(sample) for sample in samples),
            "requests": [request.prompt_ids[0] for request in engine.seen],
            "tokens": sum(len(request.prompt_ids) + 40 for request in engine.seen),
            "progress": told,
        }
    refusing = MadeUpEngine(replicas, refused=7)
    worker = RolloutWorker(refusing, sampling, mesh, num_samples=NUM_SAMPLES, seed=5)  # type: ignore[arg-type]
    try:
        worker.generate(prompts_of(16), positions_of(mesh, 16, "run"), 9)
        results["error"] = "none"
    except UserError as error:
        results["error"] = f"{type(error).__name__}: {error}"
    return results


def switch_metrics(mesh: Mesh) -> dict[str, float]:
    """Of a switch in which each rank has numbers of its own: rank + 1 times 1, 10, 100, …"""
    factor = mesh.rank + 1
    aliased, copied, sent, received, peak, asleep, weights, awake = (factor * 10**place for place in range(8))
    report = SyncReport(
        bytes_aliased=aliased,
        bytes_copied=copied,
        bytes_sent=sent,
        bytes_received=received,
        seconds=factor / 4,
        transfer_seconds=factor / 8,
        release_seconds=factor / 16,
        peak_bytes=peak,
        extra_bytes=peak * 3 // 2,
        held=HeldBytes(asleep, weights, awake),
    )
    return sync_metrics(report, mesh)


def is_right(sample: RolloutSample, prompts: Sequence[Prompt], replicas: Replicas) -> bool:
    """Whether the sample is, to the bit, what its request gives."""
    prompt = prompts[sample.position // NUM_SAMPLES]
    expected = response(GenerationRequest(prompt.token_ids, noise_key(5, 9, sample.position)), 40)
    return (
        sample.prompt is prompt
        and sample.sample == sample.position % NUM_SAMPLES
        and (sample.response_ids, sample.rollout_log_probs) == (expected.token_ids, expected.log_probs)
        and (sample.text, sample.finish_reason) == (expected.text, expected.finish_reason)
    )


def own_bytes(sample: RolloutSample) -> int:
    """Four numbers, 8 + 8 bytes a token, and the text."""
    return 32 + 16 * len(sample.response_ids) + len(sample.text.encode("utf-8", "surrogatepass"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    received: list[int] = []
    all_to_all = dist.all_to_all_single

    def counted(output: Any, *rest: Any, **options: Any) -> Any:
        received.append(output.nbytes)
        return all_to_all(output, *rest, **options)

    dist.all_to_all_single = counted
    results: dict[str, Any] = {}
    for name, (tp, pp, groups) in CASES.items():
        mesh = start_mesh(LayoutConfig(tp=tp, pp=pp), seed=0, timeout=timedelta(seconds=60))
        replicas = Replicas(tuple(map(tuple, groups)))
        everyone: list[Any] = [None] * 4
        dist.all_gather_object(everyone, run_case(mesh, replicas, received))
        results[name] = {"groups": groups, "grid": mesh.grid.flatten(1, 2).tolist(), "ranks": everyone}
        results["switch metrics"] = switch_metrics(mesh)
        # The default group stays: torchrun's store does not take a second one with the same names.
        parallel_state.destroy_model_parallel()
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(results))
    stop_mesh()


if __name__ == "__main__":
    main()
