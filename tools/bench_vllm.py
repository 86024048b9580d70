"""One GPU: what a switch from training shards to vLLM costs, against streaming the weights, and against a stock vLLM.

    python tools/bench_vllm.py --shape qwen2.5-1.5b [--layers N] [--rounds 5] [--quantization fp8] [--no-stock]
    python tools/bench_vllm.py --shape qwen2.5-1.5b --rounds 200 --seconds 120

Random weights of a published shape. Printed: bytes aliased, copied and received; seconds of the transfer and of the
whole turn (sleep, wake, transfer); the same through vLLM's loader; GPU memory at each point; log-probs against the
training forward, also after an update; tokens a second against a vLLM with weights of its own, in turns in one run,
each round as it ends.

Returns 1, with a line for each, where log-probs are on average farther from training's than the check of a run allows
(`hybrid.check_limit` as it is unless set), or where the bytes of a switch are not the formulas'.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import megappo.parallel.runtime as runtime  # isort: skip  before megatron

import torch
from cores import keep_to_fastest  # beside this file

from megappo.config.grid import GenerationGrid
from megappo.config.hybrid import default_check_limit
from megappo.config.layout import LayoutConfig
from megappo.config.rollout import RolloutConfig
from megappo.engines.hybrid.account import CLASSES, formula_of
from megappo.engines.hybrid.execute import Moved
from megappo.engines.rollout import GenerationRequest, SamplingParams, SyncReport
from megappo.engines.vllm.direct import DirectTransfer
from megappo.engines.vllm.memory import used_bytes
from megappo.engines.vllm.transfer import LoadTransfer
from megappo.engines.vllm_rollout import VLLMRolloutEngine
from megappo.models.build import ModelSpec, build_model, read_model
from megappo.models.families.published import PUBLISHED
from megappo.parallel.mesh import Mesh, start_mesh

MAX_MODEL_LEN = 1024
PROMPT_TOKENS = 128
FEWEST_ROUNDS = 5


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, choices=sorted(PUBLISHED))
    parser.add_argument("--layers", type=int, help="another number of layers than the shape has")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument(
        "--rounds", type=int, default=5, help="each four generations: ours, the stock vLLM's, its, ours"
    )
    end = f"from the start of all: no further round begins after them, but {FEWEST_ROUNDS} do"
    parser.add_argument("--seconds", type=float, help=end)
    parser.add_argument("--cycles", type=int, default=10, help="turns that are timed")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256, help="new tokens of a prompt in these generations")
    parser.add_argument("--utilization", type=float, default=0.3, help="gpu_memory_utilization")
    parser.add_argument("--stock-utilization", type=float, help="that of the stock vLLM, which has weights of its own")
    kernels = "expert kernels of the stock vLLM; auto may compile others than megappo's for many minutes first"
    parser.add_argument("--stock-moe-backend", default="triton", help=kernels)
    parser.add_argument("--quantization", choices=("fp8",), help="through vLLM's loader, then")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--no-stock", action="store_true", help="leave the other vLLM out")
    cores = "keep both engines to this many CPU cores, those that are fastest now, where slow ones would decide"
    parser.add_argument("--cores", type=int, metavar="N", help=cores)
    parser.add_argument("--stock", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.stock:
        return serve_stock(options)
    if options.cores is not None:
        try:
            row("cores", ", ".join(map(str, keep_to_fastest(options.cores))))
        except ValueError as error:
            parser.error(f"--cores: {error}")
    options.end = None if options.seconds is None else time.perf_counter() + options.seconds
    with tempfile.TemporaryDirectory() as folder:
        problems = bench(options, write_config(Path(folder), options))
    for problem in problems:
        print(f"bench_vllm.py: WRONG: {problem}", file=sys.stderr, flush=True)
    return 1 if problems else 0


def write_config(folder: Path, options: argparse.Namespace) -> Path:
    config = dict(PUBLISHED[options.shape])
    if options.layers:
        config["num_hidden_layers"] = options.layers
    config["torch_dtype"] = options.dtype
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def bench(options: argparse.Namespace, folder: Path) -> list[str]:
    """Prints everything; returns what is wrong."""
    mesh = start_mesh(LayoutConfig(), seed=0, timeout=timedelta(minutes=5))
    spec, dtype = read_model(folder), getattr(torch, options.dtype)
    row("shape", f"{options.shape}, {spec.shape.num_layers} layers, {options.dtype}")
    model = random_model(spec, mesh, dtype)
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    row("training parameters", gib(weight_bytes))
    before = used_bytes()
    start = time.perf_counter()
    config = RolloutConfig(
        engine="vllm", gpu_memory_utilization=options.utilization, enforce_eager=options.eager,
        quantization=options.quantization,
    )  # fmt: skip
    engine = VLLMRolloutEngine(
        model, spec, mesh, config, dtype=dtype, decode=lambda _: "", eos_ids=[], tokenizer_folder=folder,
        max_model_len=MAX_MODEL_LEN, weights="auto", seed=0,
    )  # fmt: skip
    row("vLLM started", f"{time.perf_counter() - start:.0f} s, graphs {'off' if options.eager else 'on'}")
    told = [options.shape, *time_turns(engine, options.cycles)]
    report = engine.sync_weights()
    problems = byte_problems(report, engine, spec, weight_bytes)
    limit = default_check_limit(options.dtype, options.quantization)
    row("held by the engine", f"asleep {gib(report.held.asleep)}, weights {gib(report.held.with_weights)}, "
        f"awake {gib(report.held.awake)}")  # fmt: skip
    row("used before vLLM", gib(before))
    problems += compare_log_probs("as built", engine, model, spec, limit)
    engine.release()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.01)
    problems += byte_problems(engine.sync_weights(), engine, spec, weight_bytes)
    problems += compare_log_probs("after an update in place", engine, model, spec, limit)
    if not options.no_stock:
        told.append(compare_speed(engine, spec, folder, options))
    time_stream(engine, model, spec, mesh, options)
    engine.close()
    print("summary: " + ", ".join(told), flush=True)
    return problems


def byte_problems(report: SyncReport, engine: VLLMRolloutEngine, spec: ModelSpec, weight_bytes: int) -> list[str]:
    """Where a switch of one rank did not move what the formulas say: M / g bytes of generation weights, none of them
    from other ranks; `weight_bytes` is M. Through vLLM's loader nothing comes from other ranks either."""
    problems = []
    expected, generated = 0, report.bytes_aliased + report.bytes_copied + report.bytes_received
    transfer = engine._transfer
    if isinstance(transfer, DirectTransfer):
        tp = len(engine.replicas.groups[0])
        expected = int(sum(formula_of(transfer.planner, name, tp).received for name in CLASSES))
        # Latent attention has parts that are made anew beside its parameters, and copied too.
        if spec.shape.latent is None and generated != weight_bytes // tp:
            problems.append(
                f"the engine has {generated:,} bytes of weights ({report.bytes_aliased:,} aliased, "
                f"{report.bytes_copied:,} copied, {report.bytes_received:,} received); "
                f"by formula {weight_bytes // tp:,}"
            )
    if report.bytes_received != expected or report.bytes_sent != expected:
        problems.append(
            f"{report.bytes_received:,} bytes were received and {report.bytes_sent:,} sent; by formula {expected:,}"
        )
    return problems


def random_model(spec: ModelSpec, mesh: Mesh, dtype: torch.dtype) -> torch.nn.Module:
    model = build_model(spec, mesh, dtype=dtype, layers="auto", head="lm")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            elif parameter.ndim > 1:
                parameter.normal_(std=0.02)
            else:
                parameter.zero_()
    return model.requires_grad_(False)


def time_turns(engine: VLLMRolloutEngine, cycles: int) -> list[str]:
    """Prints what turns move and take; returns the gist of it."""
    turns, sleeps, transfers, report = [], [], [], engine.sync_weights()
    for _ in range(cycles):
        start = time.perf_counter()
        engine.release()
        sleeps.append(time.perf_counter() - start)
        report = engine.sync_weights()
        turns.append(time.perf_counter() - start)
        transfers.append(report.transfer_seconds)
    row("bytes", f"aliased {gib(report.bytes_aliased)}, copied {gib(report.bytes_copied)}, "
        f"received {gib(report.bytes_received)}, staging {gib(report.peak_bytes)}")  # fmt: skip
    row("transfer", milliseconds(transfers))
    row("whole turn (sleep, wake, transfer)", milliseconds(turns))
    row("of it sleep", milliseconds(sleeps))
    engine.release()
    return [
        f"aliased {gib(report.bytes_aliased)}", f"copied {gib(report.bytes_copied)}",
        f"transfer {statistics.median(transfers) * 1e3:.2f} ms", f"turn {statistics.median(turns) * 1e3:.0f} ms",
    ]  # fmt: skip


def time_stream(
    engine: VLLMRolloutEngine, model: torch.nn.Module, spec: ModelSpec, mesh: Mesh, options: argparse.Namespace
) -> None:
    """The same weights as whole tensors through vLLM's loader, which rounds them anew where they are quantised; it
    writes what is already there."""
    grid = GenerationGrid(mesh.training_grid, 1)
    stream = LoadTransfer(model, spec, mesh, grid, expert_parallel=False, quantization=options.quantization)
    seconds = []

    def send(worker: Any) -> Moved:
        return stream.transfer(worker.get_model(), worker)

    for _ in range(min(options.cycles, 4)):
        torch.cuda.synchronize()
        start = time.perf_counter()
        engine._llm.collective_rpc(send)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    row("streamed through vLLM's loader", milliseconds(seconds))


@torch.no_grad()
def compare_log_probs(
    when: str, engine: VLLMRolloutEngine, model: torch.nn.Module, spec: ModelSpec, limit: float
) -> list[str]:
    """Of sampled tokens; returns what is wrong where the mean |difference| is above `limit`, or is no number."""
    requests = make_requests(spec, 8, 48)
    completions = engine.generate(requests, SamplingParams(temperature=1.0, max_tokens=64, ignore_eos=True))
    differences, device = [], next(model.parameters()).device
    for request, completion in zip(requests, completions, strict=True):
        ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]], device=device)
        logits = model(ids, torch.arange(ids.shape[1], device=device)[None], None)
        log_probs = logits[0, :, : spec.shape.vocab_size].float().log_softmax(-1)
        first = len(request.prompt_ids) - 1
        expected = log_probs[first:-1].gather(1, ids[0, first + 1 :, None])[:, 0].tolist()
        differences += [abs(ours - theirs) for ours, theirs in zip(completion.log_probs, expected, strict=True)]
    row(
        f"log-probs against training, {when}",
        f"mean |Δ| {(mean := statistics.mean(differences)):.4f}, max {max(differences):.3f}",
    )
    if mean <= limit:
        return []
    return [f"log-probs {when} are on average {mean:.4f} nats off training's; at most {limit:g}"]


def compare_speed(engine: VLLMRolloutEngine, spec: ModelSpec, folder: Path, options: argparse.Namespace) -> str:
    """Prints the tokens a second of both engines, and returns the ratios' gist."""
    command = [sys.executable, __file__, "--stock", str(folder), "--shape", options.shape, "--dtype", options.dtype]
    command += ["--utilization", str(options.stock_utilization or options.utilization)]
    command += ["--prompts", str(options.prompts), "--tokens", str(options.tokens)]
    command += ["--stock-moe-backend", options.stock_moe_backend] + (["--eager"] if options.eager else [])
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    stock = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert stock.stdin is not None and stock.stdout is not None
    to_stock, from_stock = stock.stdin, stock.stdout
    requests, sampling = make_requests(spec, options.prompts, PROMPT_TOKENS), speed_sampling(options)

    def ours() -> float:
        engine._llm.reset_prefix_cache()
        start = time.perf_counter()
        completions = engine.generate(requests, sampling)
        return sum(len(each.token_ids) for each in completions) / (time.perf_counter() - start)

    def theirs() -> float:
        print("go", file=to_stock, flush=True)
        return next(float(line.split()[1]) for line in from_stock if line.startswith("rate "))

    sides = {"megappo": ours, "stock": theirs}
    rates = take_turns(sides, options.rounds, options.end)
    stock.stdin.close()
    stock.wait(60)
    for name, several in rates.items():
        row(
            f"tokens/s, {name}", f"median {statistics.median(several):,.0f}, {min(several):,.0f} to {max(several):,.0f}"
        )
    row("ratio to stock", found := ratios(rates["megappo"], rates["stock"]))
    return f"tokens/s to stock's {found}"


def take_turns(
    sides: Mapping[str, Callable[[], float]], rounds: int, end: float | None = None
) -> dict[str, list[float]]:
    """The rates of both sides in each round, after an unmeasured generation of both. A side that generates again right
    after itself can be faster than one that comes after the other, a quarter in generations of 30 ms: so a round is
    A B B A, and a side's rate that of both its generations together, one of each kind.

    When the clock is at `end` no further round begins, but there are five.
    """
    one, other = sides
    rates: dict[str, list[float]] = {name: [] for name in sides}
    gains: dict[str, list[float]] = {name: [] for name in sides}
    for name in (other, one):
        sides[name]()
    for number in range(1, rounds + 1):
        if number > FEWEST_ROUNDS and end is not None and time.perf_counter() > end:
            break
        again, after_one, after_itself, after_other = (sides[name]() for name in (one, other, other, one))
        for name, first, second in ((one, after_other, again), (other, after_one, after_itself)):
            rates[name].append(statistics.harmonic_mean((first, second)))
            gains[name].append(second / first)
        told = f"{one} {rates[one][-1]:,.0f} ({again:,.0f}, {after_other:,.0f}), "
        row(
            f"round {number}, tokens/s",
            told + f"{other} {rates[other][-1]:,.0f} ({after_one:,.0f}, {after_itself:,.0f})",
        )
    told = ", ".join(f"{name} {statistics.median(several):.2f}" for name, several in gains.items())
    row("again, as a multiple of after the other", told)
    return rates


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Of the medians, of the fastest rounds, which a busy machine disturbs least, and of each round, with the interval
    that has the median of endless rounds in 95 of 100 cases: a narrow one, or the machine was too uneven to tell."""
    pairs = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(pairs, n=4) if len(pairs) > 1 else [*pairs] * 3
    least, most = interval_of_median(pairs)
    return (
        f"of medians {statistics.median(ours) / statistics.median(theirs):.3f}, of the fastest rounds "
        f"{max(ours) / max(theirs):.3f}, of each round: median {middle:.3f} ({least:.3f} to {most:.3f}), quartiles "
        f"{low:.3f} to {high:.3f}, {len(pairs)} rounds"
    )


def interval_of_median(values: Sequence[float], missed: float = 0.05) -> tuple[float, float]:
    """The closest pair of order statistics, equally far from both ends, between which the median of what `values` are
    drawn from lies in all but a share `missed` of cases, whatever its distribution (the sign test's interval). Of five
    values or fewer there is none at 0.05: then the whole range."""
    ordered, count = sorted(values), len(values)
    # Below the k-th of n values (from 0) lies the median if k or fewer of n tosses of a coin are heads.
    tail, outside = 0.0, 0
    while outside < count // 2 and (tail := tail + math.comb(count, outside) / 2**count) <= missed / 2:
        outside += 1
    first = max(0, outside - 1)
    return ordered[first], ordered[count - 1 - first]


def serve_stock(options: argparse.Namespace) -> int:
    """A vLLM with weights of its own: generates once for each line on standard input, and prints the rate."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import vllm

    spec = read_model(options.stock)
    llm = vllm.LLM(
        str(options.stock), skip_tokenizer_init=True, load_format="dummy", dtype=options.dtype, seed=0,
        max_model_len=MAX_MODEL_LEN, max_num_seqs=RolloutConfig().max_num_seqs,
        max_num_batched_tokens=RolloutConfig().max_num_batched_tokens, gpu_memory_utilization=options.utilization,
        enforce_eager=options.eager, disable_log_stats=True,
        **({"moe_backend": options.stock_moe_backend} if spec.shape.moe is not None else {}),
    )  # fmt: skip
    requests, parameters = make_requests(spec, options.prompts, PROMPT_TOKENS), speed_sampling(options)
    prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]
    sampling = [
        vllm.SamplingParams(
            temperature=parameters.temperature, max_tokens=parameters.max_tokens, ignore_eos=True, logprobs=0,
            detokenize=False,
        )
        for _ in requests
    ]  # fmt: skip
    for _ in sys.stdin:
        llm.reset_prefix_cache()
        start = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(f"rate {tokens / (time.perf_counter() - start)}", flush=True)
    return 0


def speed_sampling(options: argparse.Namespace) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_tokens=options.tokens, ignore_eos=True)


def make_requests(spec: ModelSpec, count: int, length: int) -> list[GenerationRequest]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(1000, spec.shape.vocab_size - 1000, (count, length), generator=generator).tolist()
    return [GenerationRequest(tuple(tokens), number) for number, tokens in enumerate(rows)]


def row(name: str, text: str) -> None:
    print(f"{name:<42} {text}", flush=True)


def gib(count: float) -> str:
    return f"{count / 2**30:.3f} GiB"


def milliseconds(seconds: Sequence[float]) -> str:
    return (
        f"median {statistics.median(seconds) * 1e3:.2f} ms, {min(seconds) * 1e3:.2f} to {max(seconds) * 1e3:.2f}, "
        f"of {len(seconds)}"
    )


if __name__ == "__main__":
    assert not runtime.on_cpu, "this benchmark needs a CUDA GPU"
    sys.exit(main())
