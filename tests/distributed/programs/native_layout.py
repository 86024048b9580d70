"""Generates in generation layouts on four ranks, from pieces cut at random and from training shards; what is right is
not here. Rank 0 writes what every rank got."""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from megappo.config.grid import GenerationGrid, TrainingGrid
from megappo.config.layout import LayoutConfig
from megappo.engines.hybrid.weights import GenerationWeights
from megappo.engines.native.loop import DecodingLoop
from megappo.engines.native.piece_model import build_piece_model
from megappo.engines.native_layout import NativeLayoutEngine, decoding_ranks
from megappo.engines.native_rollout import NativeRolloutEngine
from megappo.engines.rollout import Completion, GenerationRequest, SamplingParams
from megappo.models.architecture import ModelSpec
from megappo.models.build import build_model, read_model
from megappo.models.hf_folder import SafetensorsReader
from megappo.models.import_hf import import_hf
from megappo.models.weight_map import Rule
from megappo.parallel.mesh import Mesh, start_mesh, stop_mesh

WORLD = 4
MODELS = (
    "llama",
    "qwen2",
    "qwen3",
    "odd",
    "qwen2_moe",
    "qwen3_moe",
    "mixtral",
    "deepseek_v2",
    "deepseek_v3",
    "phi3",
    "glm4",
    "gemma2",
    "gemma3_text",
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, max_tokens=6, ignore_eos=True)
LIMITS: dict[str, Any] = {"decode": str, "eos_ids": [2], "max_num_seqs": 4, "max_num_batched_tokens": 48}


@dataclass(frozen=True)
class Case:
    """A training layout, and the generation sizes and models that it is tried with."""

    layout: LayoutConfig
    sizes: tuple[int, ...]
    models: tuple[str, ...]


CASES = {
    "tp2 dp2": Case(LayoutConfig(tp=2), (1, 2, 4), ("qwen2", "odd")),
    "tp4 sp": Case(LayoutConfig(tp=4, sequence_parallel=True), (1, 2, 4), ("llama", "odd")),
    "tp2 pp2": Case(LayoutConfig(tp=2, pp=2), (1, 2, 4), ("odd", "qwen3", "gemma3_text", "deepseek_v2")),
    "dp4": Case(LayoutConfig(), (2, 4), ("qwen3", "phi3")),
    "pp2 dp2": Case(LayoutConfig(pp=2), (1, 2, 4), ("llama", "qwen2_moe", "qwen3_moe")),
    "dp4 ep2": Case(LayoutConfig(ep=2), (1, 2, 4), ("qwen3_moe", "mixtral")),
    "tp2 dp2 ep2": Case(LayoutConfig(tp=2, ep=2, sequence_parallel=True), (1, 2, 4), ("qwen2_moe", "deepseek_v3")),
}


def requests(folder: Path) -> list[GenerationRequest]:
    prompts = json.loads((folder / "prompts.json").read_text())
    return [GenerationRequest(tuple(prompt), 1000 + place) for place, prompt in enumerate(prompts)]


def on_every_rank(completions: Sequence[Completion]) -> list[Any]:
    """What each rank of the world got, in the order of ranks."""
    everywhere: list[Any] = [None] * WORLD
    own = [(list(each.token_ids), list(each.log_probs)) for each in completions]
    dist.all_gather_object(everywhere, own)
    return everywhere


def random_cuts(shard: torch.Tensor, axis: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """The shard in up to four parts; every other one lies inside of a larger tensor."""
    count = int(torch.randint(0, 4, (), generator=generator))
    cuts = sorted({int(torch.randint(1, shard.shape[axis], (), generator=generator)) for _ in range(count)})
    parts = [part.clone() for part in shard.tensor_split(cuts, dim=axis)]
    for number, part in enumerate(parts):
        if number % 2 and part.dim() == 2:
            larger = torch.full((part.shape[0] + 3, part.shape[1] + 5), torch.nan)
            parts[number] = larger[2 : 2 + part.shape[0], 1 : 1 + part.shape[1]]
            parts[number].copy_(part)
    return tuple(parts)


def cut_weights(spec: ModelSpec, tp: int, place: int) -> GenerationWeights:
    """The generation shards of rank `place` of `tp` from the Hugging Face folder, cut at random."""
    weights = GenerationWeights()
    generator = torch.Generator().manual_seed(100 * tp + place)
    with SafetensorsReader(spec.folder) as reader:
        for rule in spec.family.weight_map(spec.shape, "lm").rules:
            name = rule.names[0]
            if rule.experts is not None:
                held = [rule.of_expert(expert) for expert in range(rule.experts)]
                weights.experts[name] = {
                    expert: random_cuts(whole_shard(reader, spec, one, 1, 0), one.axis or 0, generator)
                    for expert, one in enumerate(held)
                    if expert % tp == place
                }
            elif not rule.is_copy:
                shard = whole_shard(reader, spec, rule, tp, place)
                cuts = (shard,) if rule.axis is None else random_cuts(shard, rule.axis, generator)
                weights.parameters[name] = cuts
    return weights


def whole_shard(reader: SafetensorsReader, spec: ModelSpec, rule: Rule, tp: int, place: int) -> torch.Tensor:
    axis, parts = rule.axis or 0, []
    for segment in rule.shard(tp, place):
        if segment.source is None:
            parts.append(torch.zeros(segment.length, spec.shape.hidden_size))
        else:
            parts.append(reader.rows(segment.source, axis, segment.start, segment.length))
    return torch.cat(parts, dim=axis)


def from_random_pieces(folder: Path, mesh: Mesh, tp: int) -> dict[str, Any]:
    grid = GenerationGrid(TrainingGrid(dp=WORLD), tp)
    ranks = decoding_ranks(grid, mesh)
    results = {}
    for name in MODELS:
        spec = read_model(folder / name)
        weights = cut_weights(spec, tp, grid.tp_rank(mesh.rank))
        model = build_piece_model(spec.shape, mesh, ranks, weights, torch.float32)
        loop = DecodingLoop(model, spec.shape, ranks, str, (2,), 4, 48)
        results[name] = {
            "greedy": on_every_rank(loop.generate(requests(folder / name), GREEDY)),
            "sampled": on_every_rank(loop.generate(requests(folder / name), SAMPLED)),
            "most_pieces": max(map(len, weights.parameters.values())),
        }
    return results


def message(call: Callable[[], Any]) -> str:
    try:
        call()
    except AssertionError as error:
        return str(error)
    return "nothing was raised"


def from_training_shards(folder: Path, name: str, mesh: Mesh, tp: int) -> dict[str, Any]:
    """One engine on live shards: a switch, an update of the weights, another switch. `direct` is what the engine that
    decodes on the training shards says."""
    spec = read_model(folder / name)
    model = build_model(spec, mesh, dtype=torch.float32, layers="torch", head="lm")
    import_hf(model, spec, mesh)
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_param_gather=True, overlap_grad_reduce=True
    )
    wrapped = DistributedDataParallel(model.config, config, model)
    asked = requests(folder / name)
    engine = NativeLayoutEngine(wrapped, spec, mesh, tp=tp, bucket_bytes=4096, **LIMITS)
    too_early = message(lambda: engine.generate(asked, GREEDY))
    report = engine.sync_weights()
    result: dict[str, Any] = {
        "too_early": too_early,
        "replicas": engine.replicas.groups,
        "greedy": on_every_rank(engine.generate(asked, GREEDY)),
        "aliased": report.bytes_aliased,
        "received": report.bytes_received,
        "held": report.held.with_weights,
        "shard": sum(parameter.nbytes for parameter in model.parameters()),
    }
    engine.release()
    result["too_late"] = message(lambda: engine.generate(asked, GREEDY))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    engine.sync_weights()
    result["changed"] = on_every_rank(engine.generate(asked, SAMPLED))
    engine.close()
    if mesh.ep == 1:  # it does not decode with experts of other ranks
        direct = NativeRolloutEngine(model, spec.shape, mesh, **LIMITS)
        result["direct"] = on_every_rank(direct.generate(asked, SAMPLED))
    return result


def run(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {"cut": {}}
    for name, case in CASES.items():
        mesh = start_mesh(case.layout, seed=1, timeout=timedelta(seconds=120))
        if name == "dp4":
            results["cut"] = {tp: from_random_pieces(folder, mesh, tp) for tp in (1, 2, 4)}
        for model in case.models:
            for tp in case.sizes:
                results[f"{name} to {tp}: {model}"] = from_training_shards(folder, model, mesh, tp)
        parallel_state.destroy_model_parallel()
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = run(options.models)
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(results))
    stop_mesh()


if __name__ == "__main__":
    main()
