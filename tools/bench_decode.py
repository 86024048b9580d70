"""Tokens per second of the native engine over pipeline stages: groups of sequences that follow each other, against all
sequences in one piece, in one run.

    torchrun --nproc-per-node 2 tools/bench_decode.py --pp 2
    torchrun --nproc-per-node 2 tools/bench_decode.py --pp 2 --groups 2 4 --prompts 128 --max-tokens 32

A small Llama with random weights decodes greedily. Rounds of each number of groups take turns; the fastest and the
median of each, and whether the responses are equal. `--forward-ms` and `--token-us` make each stage's forward wait
besides, which shows what the schedule alone does where cores are shared.
"""

import argparse
import statistics
import time
from datetime import timedelta
from pathlib import Path

import megappo.parallel.runtime as runtime  # isort: skip  before megatron

import torch
import torch.distributed as dist

from megappo.config.layout import LayoutConfig
from megappo.engines.native_rollout import NativeRolloutEngine
from megappo.engines.rollout import GenerationRequest, SamplingParams
from megappo.models.architecture import ModelSpec
from megappo.models.build import build_model
from megappo.models.chunks import StageModel
from megappo.models.families import FAMILIES
from megappo.models.families.base import ModelShape
from megappo.parallel.mesh import Mesh, start_mesh, stop_mesh


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument(
        "--groups", type=int, nargs="+", help="numbers of groups beside 1; as many as stages unless given"
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--prompt-length", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--forward-ms", type=float, default=0.0, help="wait in every forward of a stage")
    parser.add_argument("--token-us", type=float, default=0.0, help="wait for each token of a forward")
    return parser.parse_args()


def build(options: argparse.Namespace, mesh: Mesh) -> tuple[ModelSpec, StageModel]:
    shape = ModelShape(
        num_layers=options.layers,
        hidden_size=options.hidden,
        ffn_size=options.hidden * 8 // 3 // 64 * 64,
        num_heads=options.hidden // 64,
        num_kv_heads=options.hidden // 64,
        head_dim=64,
        vocab_size=options.vocab,
        max_positions=options.prompt_length + options.max_tokens,
        norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        tied=False,
    )
    spec = ModelSpec(FAMILIES["llama"], shape, Path(), {})
    model = build_model(spec, mesh, dtype=getattr(torch, options.dtype), layers="auto", head="lm")
    torch.manual_seed(mesh.rank)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(std=0.05)
    return spec, model.eval()


def generated(engine: NativeRolloutEngine, options: argparse.Namespace) -> tuple[list[tuple[int, ...]], float]:
    """The responses, and the seconds that they took."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(options.vocab, (options.prompts, options.prompt_length), generator=generator)
    requests = [GenerationRequest(tuple(prompt), key) for key, prompt in enumerate(prompts.tolist())]
    sampling = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, ignore_eos=True)
    dist.barrier()
    start = time.perf_counter()
    completions = engine.generate(requests, sampling)
    if not runtime.on_cpu:
        torch.cuda.synchronize()
    return [completion.token_ids for completion in completions], time.perf_counter() - start


def main() -> None:
    options = read_options()
    mesh = start_mesh(LayoutConfig(pp=options.pp, tp=options.tp), seed=0, timeout=timedelta(minutes=5))
    spec, model = build(options, mesh)

    def wait(_: object, given: tuple[torch.Tensor, ...]) -> None:
        time.sleep(options.forward_ms / 1e3 + options.token_us / 1e6 * given[0].shape[1])

    if options.forward_ms or options.token_us:
        model.register_forward_pre_hook(wait)
    engines = {
        count: NativeRolloutEngine(
            model,
            spec.shape,
            mesh,
            decode=lambda ids: "",
            eos_ids=[],
            max_num_seqs=options.prompts,
            max_num_batched_tokens=options.prompts * options.prompt_length,
            pipeline_micro_batches=count,
        )
        for count in (1, *(options.groups or [options.pp]))
    }
    tokens = {count: generated(engine, options)[0] for count, engine in engines.items()}  # compiles and allocates
    seconds: dict[int, list[float]] = {count: [] for count in engines}
    for _ in range(options.rounds):
        for count, engine in engines.items():
            seconds[count].append(generated(engine, options)[1])
    if mesh.is_writer:
        report(options, seconds, tokens)
    stop_mesh()


def report(
    options: argparse.Namespace, seconds: dict[int, list[float]], tokens: dict[int, list[tuple[int, ...]]]
) -> None:
    device = "CPU" if runtime.on_cpu else torch.cuda.get_device_name()
    print(
        f"{options.prompts} prompts of {options.prompt_length} tokens, {options.max_tokens} new tokens each, "
        f"{options.dtype}, PP {options.pp}, TP {options.tp}, {device}, {options.rounds} rounds"
    )
    names = f"{'groups':>6}{'fastest':>10}{'median':>10}{'tokens/s':>12}{'ratio':>8}{'of medians':>12}"
    print(f"{names}{'equal responses':>18}")
    for count, times in seconds.items():
        ratios = [of(seconds[1]) / of(times) for of in (min, statistics.median)]
        equal = sum(ours == one for ours, one in zip(tokens[count], tokens[1], strict=True))
        speed = options.prompts * options.max_tokens / min(times)
        print(
            f"{count:>6}{min(times):>10.2f}{statistics.median(times):>10.2f}{speed:>12,.0f}{ratios[0]:>8.2f}"
            f"{ratios[1]:>12.2f}{f'{equal} of {options.prompts}':>18}"
        )


if __name__ == "__main__":
    main()
