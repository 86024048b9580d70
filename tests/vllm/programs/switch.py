"""Trains, switches and generates with vLLM on one layout, in every way that a switch could go wrong.

Rank 0 writes what came out; the last weights are left as a Hugging Face folder under `--export`. With `--crash` it ends
without any farewell as soon as the engine has started.
"""

import argparse
import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from megappo.config.layout import LayoutConfig
from megappo.config.rollout import RolloutConfig
from megappo.data.tokenizer import load_tokenizer
from megappo.engines.rollout import Completion, GenerationRequest, SamplingParams
from megappo.engines.vllm_rollout import VLLMRolloutEngine
from megappo.errors import UserError
from megappo.models.architecture import ModelSpec
from megappo.models.build import build_model, read_model
from megappo.models.export_hf import export_hf
from megappo.models.import_hf import import_hf
from megappo.models.stage_parameters import stage_parameters
from megappo.parallel.collectives import gather_objects
from megappo.parallel.context import context_cut
from megappo.parallel.mesh import Mesh, start_mesh, stop_mesh

MAX_MODEL_LEN = 256
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--export", type=Path)
    for name in ("tp", "pp", "cp", "ep", "generation-tp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--weights", choices=["load", "direct"], default="load")
    parser.add_argument("--seed-per-request", action="store_true")
    parser.add_argument("--crash", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    has_experts = read_model(arguments.model).shape.moe is not None  # whose training asks for it
    layout = LayoutConfig(
        tp=arguments.tp,
        pp=arguments.pp,
        cp=arguments.cp,
        ep=arguments.ep,
        sequence_parallel=arguments.tp > 1 and has_experts,
    )
    mesh = start_mesh(layout, seed=0, timeout=timedelta(minutes=2))
    config = RolloutConfig(
        engine="vllm", tensor_model_parallel_size=arguments.generation_tp, max_num_seqs=8, max_num_batched_tokens=64,
        stop=("!",), seed_per_request=arguments.seed_per_request,
    )  # fmt: skip
    on = setup(arguments.model, mesh, config, arguments.weights)
    if arguments.crash:
        dist.barrier()
        os._exit(0)
    results = {"unchanged": {"start": on.untouched}, "replicas": [list(group) for group in on.engine.replicas.groups]}
    results |= switches(on)
    results |= requests_of_all_kinds(on)
    export_hf(on.model, on.spec, mesh, arguments.export)
    results |= endings(on)
    if mesh.is_writer:
        arguments.out.write_text(json.dumps(results))
    stop_mesh()


@dataclass
class Setup:
    """One model on this layout with its engine. `untouched`: its start left random numbers and threads alone."""

    mesh: Mesh
    spec: ModelSpec
    model: GPTModel
    engine: VLLMRolloutEngine
    untouched: bool
    num_updates: int = 0

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        """Short ones, one twice, and one over a block of the cache (128 tokens on a CPU)."""
        rows = torch.randint(3, self.spec.shape.vocab_size, (4, 150), generator=torch.Generator().manual_seed(3))
        lengths = (5, 9, 5, 150)
        prompts = [tuple(row[:length]) for row, length in zip(rows.tolist(), lengths, strict=True)]
        return [*prompts, prompts[1]]

    def generate(self, sampling: SamplingParams) -> list[Completion]:
        return self.engine.generate(self.requests, sampling)

    @property
    def requests(self) -> list[GenerationRequest]:
        return [GenerationRequest(prompt, 2**62 + place) for place, prompt in enumerate(self.prompts)]

    def difference(self, completions: Sequence[Completion], temperature: float = 1.0) -> float:
        """Largest difference of the engine's log-probs from the trainer's."""
        return max(
            abs(engine - trainer)
            for prompt, completion in zip(self.prompts, completions, strict=True)
            for engine, trainer in zip(
                completion.log_probs, recomputed(self, prompt, completion.token_ids, temperature), strict=True
            )
        )

    @torch.no_grad()
    def update(self) -> None:
        """Changes every weight in place, as an optimizer does; what ranks hold twice stays the same on both."""
        self.num_updates += 1
        grid = self.mesh.training_grid
        for parameter in stage_parameters(self.model, self.spec.family.weight_map(self.spec.shape, "lm")):
            rank = self.mesh.rank
            place = (
                grid.tp_rank(rank) if parameter.expert is None else parameter.expert * grid.etp + grid.etp_rank(rank)
            )
            seed = 1000 * self.num_updates + (0 if parameter.rule.axis is None else 1 + place)
            noise = torch.randn(parameter.tensor.shape, generator=torch.Generator().manual_seed(seed))
            parameter.tensor.add_(0.05 * noise)


def setup(folder: Path, mesh: Mesh, config: RolloutConfig, weights: Literal["auto", "load", "direct"]) -> Setup:
    spec = read_model(folder)
    model = build_model(spec, mesh, dtype=torch.float32, layers="auto", head="lm")
    import_hf(model, spec, mesh)
    before = process_state()
    engine = VLLMRolloutEngine(
        model, spec, mesh, config, dtype=torch.float32, decode=text, eos_ids=[2], tokenizer_folder=folder,
        max_model_len=MAX_MODEL_LEN, weights=weights, seed=0,
    )  # fmt: skip
    return Setup(mesh, spec, model, engine, process_state() == before)


def text(token_ids: Sequence[int]) -> str:
    """A letter for every token that is not special."""
    return "".join(chr(0x100 + token) for token in token_ids if token > 2)


def process_state() -> tuple[Any, ...]:
    """What vLLM must leave as it was; it draws nothing itself."""
    generators = (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    return (*generators, torch.set_num_threads)


@torch.no_grad()
def recomputed(on: Setup, prompt: Sequence[int], response: Sequence[int], temperature: float) -> list[float]:
    """Log-probs of the response from a plain forward of the training shards."""
    mesh, ids = on.mesh, [*prompt, *response]
    padded = torch.tensor([ids + [0] * (-len(ids) % mesh.sequence_alignment)])
    length = padded.shape[1]
    if not mesh.is_first_stage:
        hidden = torch.empty(length // mesh.sequence_alignment, 1, on.spec.shape.hidden_size)
        dist.recv(hidden, group=mesh.pp_group, group_src=mesh.pp_rank - 1)
        on.model.set_input_tensor(hidden)
    cut, ends = context_cut(mesh), torch.tensor([0, length])
    if mesh.cp == 1:
        output = on.model(padded, torch.arange(length)[None], None)
    else:
        output = cut.whole(on.model(cut.local(padded, ends), cut.local(torch.arange(length)[None], ends), None), ends)
    if not mesh.is_last_stage:
        dist.send(output.contiguous(), group=mesh.pp_group, group_dst=mesh.pp_rank + 1)
    log_probs = torch.empty(len(response))
    if mesh.is_last_stage:
        shards = [torch.empty_like(output[0]) for _ in range(mesh.tp)]
        dist.all_gather(shards, output[0].contiguous(), group=mesh.tp_group)
        rows = (torch.cat(shards, dim=1)[:, : on.spec.shape.vocab_size] / temperature).log_softmax(dim=1)
        rows = rows[len(prompt) - 1 : len(ids) - 1]
        log_probs = rows.gather(1, torch.tensor(response)[:, None])[:, 0].contiguous()
    dist.broadcast(log_probs, src=mesh.last_stage_rank, group=mesh.pp_group)
    return log_probs.tolist()


def switches(on: Setup) -> dict[str, Any]:
    """Three updates; what the engine says after each, against the trainer. One switch forgets the prefix cache."""
    before = process_state()
    report = on.engine.sync_weights()
    first = on.generate(GREEDY)
    differences = {"imported": on.difference(first)}
    on.engine.release()
    is_refused = refused(lambda: on.generate(GREEDY), AssertionError)
    on.update()
    reset, on.engine._llm.reset_prefix_cache = on.engine._llm.reset_prefix_cache, lambda: True
    on.engine.sync_weights()
    differences["stale cache"] = on.difference(on.generate(GREEDY))
    on.engine._llm.reset_prefix_cache = reset
    on.engine.sync_weights()
    differences["update"] = on.difference(on.generate(GREEDY))
    sampling = SamplingParams(temperature=0.7, max_tokens=12)
    sampled = on.generate(sampling)
    differences["sampled"] = on.difference(sampled, 0.7)
    greedy = on.generate(GREEDY)
    return {
        "differences": {name: max(gather_objects(value, dist.group.WORLD)) for name, value in differences.items()},
        "prompts": on.prompts,
        "changed": tokens(greedy) != tokens(first),
        "greedy": [{"tokens": list(each.token_ids), "log_probs": list(each.log_probs)} for each in greedy],
        "same again": on.generate(sampling) == sampled,
        "same alone": tokens(on.engine.generate(on.requests[2:3], sampling)) == tokens(sampled[2:3]),
        "ranks agree": all(other == sampled for other in gather_objects(sampled, dist.group.WORLD)),
        # Tokens: log-probs may be rounded by the place in the batch.
        "same prompt": tuple(tokens(both[1:2]) == tokens(both[4:5]) for both in (greedy, sampled)),
        "text": all(each.text == text(each.token_ids) for each in sampled),
        "refused asleep": is_refused,
        "unchanged": {"start": on.untouched, "use": process_state() == before},
        "report": vars(report) | {"held": vars(report.held)},
        "weight bytes": sum(parameter.nbytes for parameter in on.model.parameters()),
    }


def tokens(completions: Sequence[Completion]) -> list[list[int]]:
    return [list(completion.token_ids) for completion in completions]


def refused(call: Callable[[], object], error: type[Exception]) -> str:
    """What `call` raises."""
    try:
        call()
    except error as raised:
        return f"{type(raised).__name__}: {raised}"
    return "nothing was raised"


def requests_of_all_kinds(on: Setup) -> dict[str, Any]:
    """Ends of responses, limits of sampling, replicas with different requests, and requests that can't be."""
    greedy = tokens(on.generate(GREEDY))[0]
    request = [GenerationRequest(on.prompts[0], 1)]

    def answer(**settings: Any) -> Completion:
        return on.engine.generate(request, SamplingParams(**({"temperature": 0.0, "max_tokens": 12} | settings)))[0]

    own = on.engine.replicas.of(on.mesh.rank)
    alone = on.engine.generate([GenerationRequest(on.prompts[own], 7)] * (own + 1), GREEDY)
    progress: list[tuple[int, int]] = []
    requests = [GenerationRequest(prompt, 1) for prompt in on.prompts]
    on.engine.generate(requests, GREEDY, lambda done, of: progress.append((done, of)))
    stopped = answer(stop_token_ids=(greedy[3],))
    low_top_p = answer(temperature=1.0, top_p=1e-6)
    printable = next(token for token in greedy[1:] if 3 < token < 99)  # of the tiny tokenizer
    string = answer(stop=(load_tokenizer(on.spec.folder).decode([printable]),))
    too_long = [*request, GenerationRequest((5,) * 250, 2)]
    return {
        "greedy first": greedy,
        "empty": on.engine.generate([], GREEDY),
        "stop token": (list(stopped.token_ids), stopped.finish_reason),
        "stop string": (list(string.token_ids), string.finish_reason, printable),
        "length": answer().finish_reason,
        "top-k 1": (list(answer(temperature=1.0, top_k=1).token_ids), max(map(abs, answer(top_k=1).log_probs)) > 0.1),
        "top-p": (list(low_top_p.token_ids), max(map(abs, low_top_p.log_probs))),
        "alone": gather_objects((own, tokens(alone)), dist.group.WORLD),
        "progress": progress,
        "too long": refused(lambda: on.engine.generate(too_long, GREEDY), UserError),
        "too cold": refused(lambda: answer(temperature=0.001), UserError),
        "afterwards": tokens(on.generate(GREEDY))[0] == greedy,
    }


def endings(on: Setup) -> dict[str, Any]:
    """The engine goes; torch's and Megatron's groups stay."""
    on.engine.close()
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.all_reduce(total, group=on.mesh.tp_group)
    return {"ranks after the end": [total.item(), on.mesh.world_size * on.mesh.tp]}


if __name__ == "__main__":
    main()
