"""Tokens per second of the native rollout engine against a forward of the whole sequence for every token, in one run.

    python tools/bench_generate.py                                    a small Llama with random weights
    python tools/bench_generate.py --model FOLDER --dtype bfloat16    a Hugging Face folder
    torchrun --nproc-per-node 2 tools/bench_generate.py --tp 2

Both decode greedily; in float32 the last line says whether their tokens are equal.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import megappo.parallel.runtime as runtime  # isort: skip  before megatron

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from megappo.config.layout import LayoutConfig
from megappo.engines.native_rollout import NativeRolloutEngine
from megappo.engines.rollout import GenerationRequest, SamplingParams
from megappo.models.architecture import ModelSpec
from megappo.models.build import build_model, read_model
from megappo.models.families import FAMILIES
from megappo.models.families.base import ModelShape
from megappo.models.import_hf import import_hf
from megappo.parallel.mesh import Mesh, start_mesh, stop_mesh


@dataclass(frozen=True)
class Measured:
    """One way to generate: its tokens, in the order of the prompts, and the seconds that they took."""

    tokens: list[list[int]]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Hugging Face folder; without it, random weights of the shape below")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--ffn", type=int, default=704)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-length", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--skip-naive", action="store_true", help="measure the engine alone")
    return parser.parse_args()


def spec_of(options: argparse.Namespace) -> ModelSpec:
    if options.model is not None:
        return read_model(options.model)
    shape = ModelShape(
        num_layers=options.layers,
        hidden_size=options.hidden,
        ffn_size=options.ffn,
        num_heads=options.heads,
        num_kv_heads=options.kv_heads,
        head_dim=options.hidden // options.heads,
        vocab_size=options.vocab,
        max_positions=options.prompt_length + options.max_tokens,
        norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        tied=False,
    )
    return ModelSpec(FAMILIES["llama"], shape, Path(), {})


def build(options: argparse.Namespace, spec: ModelSpec, mesh: Mesh) -> GPTModel:
    model = build_model(spec, mesh, dtype=getattr(torch, options.dtype), layers="auto", head="lm")
    if options.model is not None:
        import_hf(model, spec, mesh)
    else:
        torch.manual_seed(mesh.tp_rank)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.fill_(1.0) if "norm" in name else parameter.normal_(std=0.05)
    return model.eval()


def timed(generate: Callable[[], list[list[int]]]) -> Measured:
    """Of the second of two runs: the first one compiles and allocates."""
    generate()
    if not runtime.on_cpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    tokens = generate()
    return Measured(tokens, time.perf_counter() - start)


def without_cache(
    model: GPTModel, mesh: Mesh, vocab_size: int, prompts: torch.Tensor, num_tokens: int
) -> list[list[int]]:
    """All sequences in one batch, [batch, length] recomputed from the start for each token."""
    ids = prompts.to(mesh.device)
    for _ in range(num_tokens):
        positions = torch.arange(ids.shape[1], device=mesh.device).expand_as(ids)
        with torch.no_grad():
            last = model(ids, positions, None)[:, -1].contiguous()
        shards = [torch.empty_like(last) for _ in range(mesh.tp)]
        dist.all_gather(shards, last, group=mesh.tp_group)
        ids = torch.cat([ids, torch.cat(shards, dim=1)[:, :vocab_size].argmax(1, keepdim=True)], dim=1)
    return ids[:, prompts.shape[1] :].tolist()


def report(options: argparse.Namespace, engine: Measured, naive: Measured | None) -> None:
    device = "CPU" if runtime.on_cpu else torch.cuda.get_device_name()
    print(
        f"{options.prompts} prompts of {options.prompt_length} tokens, {options.max_tokens} new tokens each, "
        f"{options.dtype}, TP {options.tp}, {device}"
    )
    print(f"{'':<28}{'seconds':>10}{'tokens/s':>12}{'ratio':>8}")
    ratio = "" if naive is None else f"{engine.tokens_per_second / naive.tokens_per_second:.1f}"
    print(f"{'native engine':<28}{engine.seconds:>10.2f}{engine.tokens_per_second:>12,.0f}{ratio:>8}")
    if naive is not None:
        print(f"{'whole sequence every token':<28}{naive.seconds:>10.2f}{naive.tokens_per_second:>12,.0f}{1:>8.1f}")
        equal = sum(ours == theirs for ours, theirs in zip(engine.tokens, naive.tokens, strict=True))
        print(f"equal responses: {equal} of {len(naive.tokens)}")


def main() -> None:
    options = read_options()
    mesh = start_mesh(LayoutConfig(tp=options.tp), seed=0, timeout=timedelta(minutes=5))
    spec = spec_of(options)
    model = build(options, spec, mesh)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(spec.shape.vocab_size, (options.prompts, options.prompt_length), generator=generator)
    requests = [GenerationRequest(tuple(prompt), key) for key, prompt in enumerate(prompts.tolist())]
    sampling = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, ignore_eos=True)
    engine = NativeRolloutEngine(
        model,
        spec.shape,
        mesh,
        decode=lambda ids: " ".join(map(str, ids)),
        eos_ids=(),
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=8192,
    )
    measured = timed(lambda: [list(each.token_ids) for each in engine.generate(requests, sampling)])
    naive = None
    if not options.skip_naive:
        naive = timed(lambda: without_cache(model, mesh, spec.shape.vocab_size, prompts, options.max_tokens))
    if mesh.is_writer:
        report(options, measured, naive)
    stop_mesh()


if __name__ == "__main__":
    main()
