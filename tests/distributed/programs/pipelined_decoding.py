"""Decodes over pipeline stages with the sequences of a step in one group and in several; what is right is not here.

Layouts one after another on the ranks that there are; of each, rank 0 writes what came out.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megappo.config.layout import LayoutConfig
from megappo.engines.native.lane import Lane
from megappo.engines.native_rollout import NativeRolloutEngine
from megappo.engines.rollout import Completion, GenerationRequest, SamplingParams
from megappo.models.architecture import ModelSpec
from megappo.models.build import build_model, read_model
from megappo.models.import_hf import import_hf
from megappo.parallel.mesh import Mesh, start_mesh, stop_mesh

SECONDS = 0.06
"""What a stage's forward takes at least where the overlap is watched: much more than a message."""
NUM_TOKENS = 4


@dataclass(frozen=True)
class Case:
    layout: LayoutConfig
    groups: tuple[int | None, ...]


CASES = {
    "one": Case(LayoutConfig(), (1,)),
    "pp2": Case(LayoutConfig(pp=2), (None, 7)),
    "pp2 vpp2": Case(LayoutConfig(pp=2, vpp=2), (3,)),
    "tp2 pp2 sp": Case(LayoutConfig(tp=2, pp=2, sequence_parallel=True), (None, 3)),
    "pp4": Case(LayoutConfig(pp=4), (1, None, 2, 5)),
}


def prompts() -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 40, (9,), generator=generator).tolist()
    return [tuple(torch.randint(3, 128, (length,), generator=generator).tolist()) for length in lengths]


def requests() -> list[GenerationRequest]:
    return [GenerationRequest(prompt, 100 + number) for number, prompt in enumerate(prompts())]


def copies() -> list[GenerationRequest]:
    """Four responses to each of three prompts, which share a prefill where they are in one group."""
    keys = iter(range(12))
    return [GenerationRequest(prompt, next(keys)) for prompt in prompts()[:3] for _ in range(4)]


def short_first() -> list[GenerationRequest]:
    """The first half ends after one token: a whole group of two, in its first step."""
    return [
        GenerationRequest(one.prompt_ids, one.noise_key, max_tokens=1 if place < 5 else None)
        for place, one in enumerate(requests())
    ]


PLAIN = SamplingParams(temperature=1.0, max_tokens=7)
RESTRICTED = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, max_tokens=7)
TRIALS: dict[str, tuple[list[GenerationRequest], SamplingParams, dict[str, Any]]] = {
    "ragged": (requests(), PLAIN, {}),
    "restricted": (requests(), RESTRICTED, {}),
    # A sixth of the tokens end a response, so that they leave at different steps and waiting ones come in.
    "few slots": (requests(), PLAIN, {"max_num_seqs": 5, "max_num_batched_tokens": 48, "eos_ids": range(2, 24)}),
    "copies": (copies(), PLAIN, {"max_num_seqs": 7}),
    "a group ends": (short_first(), PLAIN, {}),
    "alone": (requests()[4:5], PLAIN, {}),
}


def text(token_ids: Sequence[int]) -> str:
    return "".join(chr(0x100 + token) for token in token_ids if token > 2)


@dataclass(frozen=True)
class Stage:
    """This rank's part of a model on a layout."""

    spec: ModelSpec
    mesh: Mesh
    model: Any

    @classmethod
    def of(cls, folder: Path, mesh: Mesh) -> "Stage":
        spec = read_model(folder)
        model = build_model(spec, mesh, dtype=torch.float32, layers="torch", head="lm")
        import_hf(model.eval(), spec, mesh)
        return cls(spec, mesh, model)

    def engine(self, groups: int | None, **settings: Any) -> NativeRolloutEngine:
        defaults: dict[str, Any] = {"eos_ids": [2], "max_num_seqs": 16, "max_num_batched_tokens": 999}
        settings = defaults | settings | {"pipeline_micro_batches": groups}
        return NativeRolloutEngine(self.model, self.spec.shape, self.mesh, decode=text, **settings)


def written(completions: Sequence[Completion]) -> list[Any]:
    """Token ids, log-probs, how they end, and the experts where they were recorded."""
    return [
        [
            list(each.token_ids),
            list(each.log_probs),
            each.finish_reason,
            None if each.routed_experts is None else each.routed_experts.tolist(),
        ]
        for each in completions
    ]


def trials(dense: Stage, experts: Stage, groups: int | None) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, (asked, sampling, settings) in TRIALS.items():
        results[name] = written(dense.engine(groups, **settings).generate(asked, sampling))
    recording = experts.engine(groups, max_num_seqs=6, records_experts=True)
    results["experts"] = written(recording.generate(requests(), dataclasses.replace(PLAIN, max_tokens=4)))
    mesh = dense.mesh
    every_rank: list[Any] = [None] * (mesh.tp * mesh.pp)
    dist.all_gather_object(every_rank, results, group=mesh.model_parallel_group)
    results["ranks_agree"] = all(other == results for other in every_rank)
    return results


@contextmanager
def watched(chunk: torch.nn.Module, events: list[tuple[str, int, float]]) -> Iterator[None]:
    """While inside, the stage is slow, and what the rank does is noted: (what, lane, when in this host's seconds).

    The first lane has two sequences of two tokens and the second one of three, so that their steps can be told apart.
    """

    def note(what: str, token_ids: torch.Tensor) -> None:
        events.append((what, token_ids.shape[1] % 2, time.monotonic()))

    def before(_: Any, given: tuple[Any, ...]) -> None:
        note("begins", given[0])
        time.sleep(SECONDS)

    take = Lane.take

    def noted_take(self: Lane) -> Sequence[Any]:
        sequences = take(self)
        if sequences:
            note("has tokens", self.tokens.token_ids[None])
        return sequences

    hooks = [
        chunk.register_forward_pre_hook(before),
        chunk.register_forward_hook(lambda _, given, output: note("ends", given[0])),
    ]
    Lane.take = noted_take  # type: ignore[method-assign]
    try:
        yield
    finally:
        Lane.take = take  # type: ignore[method-assign]
        for hook in hooks:
            hook.remove()


def overlap(stage: Stage, groups: int) -> list[Any]:
    """Three responses on slow stages: what each rank did when."""
    asked = [GenerationRequest((5, 6), 0), GenerationRequest((7, 8), 1), GenerationRequest((9, 10, 11), 2)]
    engine = stage.engine(groups)
    events: list[tuple[str, int, float]] = []
    with watched(stage.model, events):
        dist.barrier()
        engine.generate(asked, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
    both: list[Any] = [None, None]
    dist.all_gather_object(both, events, group=stage.mesh.model_parallel_group)
    return both


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", type=Path)
    parser.add_argument("--cases", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name in options.cases:
        case = CASES[name]
        mesh = start_mesh(case.layout, seed=1, timeout=timedelta(seconds=60))
        dense, experts = (Stage.of(options.models / kind, mesh) for kind in ("dense", "experts"))
        results[name] = {str(groups): trials(dense, experts, groups) for groups in case.groups}
        if name == "pp2":
            results["overlap"] = {groups: overlap(dense, groups) for groups in (1, 2)}
        parallel_state.destroy_model_parallel()
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(results))
    stop_mesh()


if __name__ == "__main__":
    main()
