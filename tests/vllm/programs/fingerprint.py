"""Every element of a model numbered, and moved directly into vLLM's parameters: are they where they belong?

Also with weights that make sense: log-probs against the trainer's after updates. Arguments: --model FOLDER (numbered)
--sensible FOLDER --tp T --generation-tp G --out FILE.
"""

import argparse
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megappo.config.layout import LayoutConfig
from megappo.config.rollout import RolloutConfig
from megappo.engines.hybrid.kinds import with_numbers
from megappo.engines.rollout import GenerationRequest, SamplingParams
from megappo.engines.vllm.destination import VLLMDestination
from megappo.engines.vllm_rollout import VLLMRolloutEngine
from megappo.models.build import build_model, read_model
from megappo.models.import_hf import import_hf
from megappo.parallel.collectives import gather_objects
from megappo.parallel.mesh import Mesh, start_mesh, stop_mesh
from tests.support.fingerprints import VLLMShards


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    for name in ("tp", "pp", "ep", "generation-tp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    layout = LayoutConfig(tp=arguments.tp, pp=arguments.pp, ep=arguments.ep)
    mesh = start_mesh(layout, seed=0, timeout=timedelta(minutes=2))
    result = run(arguments.model, mesh, arguments.generation_tp)
    ranks = gather_objects(result, mesh.world_group)
    if mesh.is_writer:
        arguments.out.write_text(json.dumps(ranks))
    stop_mesh()


def run(folder: Path, mesh: Mesh, generation_tp: int) -> dict[str, Any]:
    spec = read_model(folder)
    model = build_model(spec, mesh, dtype=torch.float32, layers="auto", head="lm")
    import_hf(model, spec, mesh)
    config = RolloutConfig(engine="vllm", tensor_model_parallel_size=generation_tp, max_num_seqs=8)
    engine = VLLMRolloutEngine(
        model, spec, mesh, config, dtype=torch.float32, decode=str, eos_ids=[2], tokenizer_folder=folder,
        max_model_len=64, weights="direct", seed=0, bucket_bytes=1 << 14,
    )  # fmt: skip
    report = engine.sync_weights()
    shards = VLLMShards(folder, spec.shape, generation_tp, engine._grid.tp_rank(mesh.rank))
    (wrong,) = engine._llm.collective_rpc(lambda worker: compare(worker.get_model(), engine, mesh, shards))
    # A broken byte is found and named; the next switch puts it right.
    (name,) = engine._llm.collective_rpc(lambda worker: spoil(worker.get_model(), mesh))
    named = engine.worst_tensor()
    engine.sync_weights()
    repaired = engine.worst_tensor()
    # Numbers this large make no sense as weights: small ones from here on.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.sin(parameter) * 0.1 + (1.0 if parameter.ndim == 1 else 0.0))
    engine.sync_weights()
    prompts = [(3, 5, 7, 11), (4, 9), (20, 21, 22, 23, 24, 25)]
    requests = [GenerationRequest(prompt, number) for number, prompt in enumerate(prompts)]
    completions = engine.generate(requests, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    result = {
        "group": list(engine.replicas.groups[engine.replicas.of(mesh.rank)]),
        "wrong": wrong,
        "spoiled": name,
        "named": str(named) if named else None,
        "repaired": str(repaired) if repaired else None,
        "aliased": report.bytes_aliased,
        "copied": report.bytes_copied,
        "received": report.bytes_received,
        "tokens": [list(each.token_ids) for each in completions],
        "log_probs": [list(each.log_probs) for each in completions],
    }
    engine.close()
    return result


def compare(vllm_model: nn.Module, engine: VLLMRolloutEngine, mesh: Mesh, shards: VLLMShards) -> list[str]:
    """Names of vLLM's parameters of which an element is not what belongs there."""
    destination, wrong = VLLMDestination(vllm_model, mesh.device), []
    planner = engine._transfer.planner  # type: ignore[attr-defined]
    for target in planner.targets.of(mesh.rank):
        for layer in target.layers:
            name = with_numbers(target.name, layer)
            if not torch.equal(destination.parameter(name).data, shards.expected(name)):
                wrong.append(name)
    return wrong


def spoil(vllm_model: nn.Module, mesh: Mesh) -> str | None:
    """Changes one number of a parameter that is not training's memory, on rank 1."""
    name = "model.layers.1.self_attn.qkv_proj.weight"
    if mesh.rank != 1:
        return None
    data: Tensor = VLLMDestination(vllm_model, mesh.device).parameter(name).data
    data[3, 5] += 0.5
    return name


if __name__ == "__main__":
    main()
