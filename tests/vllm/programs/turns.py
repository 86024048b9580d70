"""Turns of vLLM beside a training that updates its weights: log-probs, bytes and memory at each point of each switch.

On GPUs, in bfloat16, with sleep; also on a CPU, in float32. Rank 0 writes one result a rank.
"""

import megappo.parallel.runtime as runtime  # isort: skip  before megatron

import argparse
import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from megappo.config.layout import LayoutConfig
from megappo.config.rollout import RolloutConfig
from megappo.engines.rollout import Completion, GenerationRequest, SamplingParams
from megappo.engines.vllm.direct import DirectTransfer
from megappo.engines.vllm.memory import used_bytes
from megappo.engines.vllm_rollout import VLLMRolloutEngine
from megappo.models.build import build_model, read_model
from megappo.models.import_hf import import_hf
from megappo.models.stage_parameters import stage_parameters
from megappo.parallel.collectives import gather_objects
from megappo.parallel.mesh import Mesh, start_mesh, stop_mesh

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SWITCHES = 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    for name in ("tp", "ep", "generation-tp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--weights", choices=["auto", "load", "direct"], default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    mesh = start_mesh(LayoutConfig(tp=arguments.tp, ep=arguments.ep), seed=0, timeout=timedelta(minutes=5))
    ranks = gather_objects(Turns(arguments, mesh).run(), mesh.world_group)
    if mesh.is_writer:
        arguments.out.write_text(json.dumps(ranks))
    stop_mesh()


class Turns:
    """One model on this rank, and its engine; the ranks of a replica do the same."""

    def __init__(self, arguments: argparse.Namespace, mesh: Mesh) -> None:
        dtype = torch.float32 if runtime.on_cpu else torch.bfloat16
        self.mesh = mesh
        self.spec = read_model(arguments.model)
        self.model: Any = build_model(self.spec, mesh, dtype=dtype, layers="auto", head="lm")
        import_hf(self.model, self.spec, mesh)
        self.model.requires_grad_(False)
        self.weight_map = self.spec.family.weight_map(self.spec.shape, "lm")
        config = RolloutConfig(
            engine="vllm", tensor_model_parallel_size=arguments.generation_tp, max_num_seqs=8,
            max_num_batched_tokens=256, gpu_memory_utilization=0.15, enforce_eager=arguments.eager,
            quantization=arguments.quantization,
        )  # fmt: skip
        self.engine = VLLMRolloutEngine(
            self.model, self.spec, mesh, config, dtype=dtype, decode=str, eos_ids=[2],
            tokenizer_folder=arguments.model, max_model_len=128, weights=arguments.weights, seed=0,
        )  # fmt: skip
        rows = torch.randint(3, self.spec.shape.vocab_size, (4, 20), generator=torch.Generator().manual_seed(3))
        self.prompts = [tuple(row[: 5 * (1 + place)]) for place, row in enumerate(rows.tolist())]

    def run(self) -> dict[str, Any]:
        switches, before = [], None
        for number in range(SWITCHES):
            if number:
                self.update(number)
            switches.append(self.turn(before))
            before = switches[-1].pop("completions")
        self.engine.sync_weights()
        result = {"switches": switches, "expert parallel": self.expert_parallel(), "spoiled": self.spoiled()}
        self.engine.close()
        return result

    def turn(self, before: Sequence[Completion] | None) -> dict[str, Any]:
        """One switch, generation and release. `before`: what was generated with the weights before the update."""
        report = self.engine.sync_weights()
        completions = self.generate()
        worst = self.engine.worst_tensor()
        used_awake, absent_awake = used_bytes(), self.engine.absent.now
        stale = self.differences(before) if before is not None else [0.0]
        differences = self.differences(completions)
        (owned,) = self.engine._llm.collective_rpc(lambda worker: self.owned_bytes(worker.get_model()))
        self.engine.release()
        return {
            "mean": mean(differences),
            "max": max(differences),
            "stale": mean(stale),
            "worst tensor": None if worst is None else str(worst),
            "report": vars(report) | {"held": vars(report.held)},
            "owned bytes": owned,
            "training bytes": sum(parameter.nbytes for parameter in self.model.parameters()),
            "graph copies": self.has_recorded_copies(),
            "used awake": used_awake,
            "used asleep": used_bytes(),
            "absent awake": absent_awake,
            "absent asleep": self.engine.absent.now,
            "allocated asleep": 0 if runtime.on_cpu else torch.cuda.memory_allocated(),
            "completions": completions,
        }

    def generate(self) -> list[Completion]:
        requests = [GenerationRequest(prompt, place) for place, prompt in enumerate(self.prompts)]
        return self.engine.generate(requests, GREEDY)

    @torch.no_grad()
    def differences(self, completions: Sequence[Completion]) -> list[float]:
        """|engine − training| of the log-prob of each token, by a plain forward of the training shards."""
        found = []
        for prompt, completion in zip(self.prompts, completions, strict=True):
            ids = torch.tensor([[*prompt, *completion.token_ids]], device=self.mesh.device)
            logits = self.model(ids, torch.arange(ids.shape[1], device=self.mesh.device)[None], None)
            log_probs = logits[0, :, : self.spec.shape.vocab_size].float().log_softmax(-1)
            first = len(prompt) - 1
            expected = log_probs[first:-1].gather(1, ids[0, first + 1 :, None])[:, 0].tolist()
            found += [abs(ours - theirs) for ours, theirs in zip(completion.log_probs, expected, strict=True)]
        return found

    @torch.no_grad()
    def update(self, number: int) -> None:
        """Changes every weight in place, as an optimizer does; what ranks hold twice stays the same on both."""
        grid = self.mesh.training_grid
        for parameter in stage_parameters(self.model, self.weight_map):
            rank = self.mesh.rank
            place = (
                grid.tp_rank(rank) if parameter.expert is None else parameter.expert * grid.etp + grid.etp_rank(rank)
            )
            seed = 1000 * number + (0 if parameter.rule.axis is None else 1 + place)
            noise = torch.randn(parameter.tensor.shape, generator=torch.Generator().manual_seed(seed))
            parameter.tensor.add_(0.05 * noise.to(parameter.tensor))

    def owned_bytes(self, vllm_model: nn.Module) -> int:
        """Bytes of vLLM's parameters that are not training's memory."""
        trained = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}
        owned: dict[int, Tensor] = {
            parameter.data_ptr(): parameter.data
            for parameter in vllm_model.parameters()
            if parameter.untyped_storage().data_ptr() not in trained
        }
        return sum(tensor.nbytes for tensor in owned.values())

    def has_recorded_copies(self) -> bool:
        """Whether copies on the device are replayed from a CUDA graph."""
        transfer = self.engine._transfer
        return isinstance(transfer, DirectTransfer) and transfer._switch._copies._graph is not None

    def expert_parallel(self) -> bool:
        return bool(self.engine._llm.llm_engine.vllm_config.parallel_config.enable_expert_parallel)

    def spoiled(self) -> str | None:
        """The tensor that is named after one number of vLLM's fused q, k and v was changed on the last rank."""

        def spoil(worker: Any) -> None:
            parameters = dict(worker.get_model().named_parameters())
            weight = parameters["model.layers.1.self_attn.qkv_proj.weight"]
            if self.mesh.rank == self.mesh.world_size - 1 and weight.dtype.itemsize > 1 and weight.numel():
                weight.data[3, 5] += 0.5

        self.engine._llm.collective_rpc(spoil)
        found = self.engine.worst_tensor()
        return None if found is None else str(found)


if __name__ == "__main__":
    main()
