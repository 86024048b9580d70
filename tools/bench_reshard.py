"""Measures the switch between any two layouts on real ranks, beside the formulas and beside gathering whole tensors.

    python tools/bench_reshard.py --shape tiny-llama 1-4-1:2,1 2-2-2:4,2,1
    python tools/bench_reshard.py --shape models/smollm2 1-1-2:2,1                      (a folder, or a config.json)
    python tools/bench_reshard.py --shape qwen2.5-1.5b --dtype bfloat16 --engine vllm 1-2-1:1      (on 2 GPUs)

A case is p-t-d:g[,g…]: the training layout (pipeline, tensor, data-parallel; @epN[,etpM] for experts) and the sizes of
the generation replicas. Ranks are started here, on GPUs where there are any, otherwise on CPUs with gloo. Weights are
random. `--engine vllm` fills tensors of vLLM's shapes; vLLM itself is not needed. The machine's noise is in seconds:
compare ratios, whose two figures are of one run.

All bytes are measured: received on the wire, the others as the tensors lie in memory. Extra memory is what a switch
held at most beyond what it left: by the CUDA allocator, on a CPU as the switch counts it. The exit code is 1 where
bytes are not those of the formulas, or where a case fails; the other cases go on.

What a link gives is measured beside it: every rank sends one large message to the next rank while it takes one from the
rank before, so that each link is busy in both directions. "Of the link" is the bytes that the busiest rank takes in a
switch, over the whole switch's time, as a share of that speed. A switch also copies inside a GPU and sends many tensors
in buckets; a rank that takes from several others at once has more than one link where GPUs are switched (NVLink), so
that the share can be above 1.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import megappo.parallel.runtime as runtime  # isort: skip  before megatron

import model_shape  # beside this file
import torch
from link_speed import link_speed, link_text, timed  # beside this file
from megatron.core import parallel_state
from switches import Measured, NativeSwitch, TensorSwitch, why_no_formula  # beside this file
from torch import nn

from megappo.config.grid import GenerationGrid, TrainingGrid
from megappo.config.layout import LayoutConfig
from megappo.engines.hybrid.account import CLASSES, Account, Formula, account_of, formula_of
from megappo.engines.hybrid.execute import Moved
from megappo.engines.hybrid.layout_text import layout_text, parse_layout
from megappo.engines.hybrid.stream import hf_tensors
from megappo.errors import UserError
from megappo.models.architecture import ModelSpec, check_layout
from megappo.models.build import build_model
from megappo.models.weight_map import WeightClass
from megappo.parallel.collectives import gather_objects
from megappo.parallel.mesh import Mesh, start_mesh, stop_mesh

COLUMNS = ("received", "formula", "naive", "peak", "formula", "redundant", "formula", "copied")


@dataclass(frozen=True)
class Case:
    training: TrainingGrid
    generation: int

    @classmethod
    def parse(cls, text: str) -> tuple["Case", ...]:
        """The cases of `p-t-d:g,g`. Raises what argparse shows for a text that is none."""
        layout, _, sizes = text.partition(":")
        training = parse_layout(layout)
        cases = tuple(cls(training, int(size)) for size in sizes.split(","))
        try:
            for case in cases:
                GenerationGrid(training, case.generation)
        except UserError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return cases

    def __str__(self) -> str:
        return f"{layout_text(self.training)}:{self.generation}"

    def layout(self, spec: ModelSpec) -> LayoutConfig:
        sizes = self.training
        is_sequence_parallel = spec.shape.moe is not None and sizes.tp > 1
        return LayoutConfig(
            tp=sizes.tp, pp=sizes.pp, ep=sizes.ep, etp=sizes.etp, sequence_parallel=is_sequence_parallel
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", type=Case.parse, metavar="p-t-d:g", help="layouts, such as 2-2-2:4,2,1")
    parser.add_argument("--shape", default="tiny-llama", help=model_shape.HELP)
    parser.add_argument("--layers", type=int, help="another number of layers than the shape has")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--engine", default="native", choices=("native", "vllm"), help="whose parameters are filled")
    parser.add_argument("--bucket-mib", type=float, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)  # of a rank: where each case is told as it ends
    options = parser.parse_args(arguments)
    cases = [case for several in options.cases for case in several]
    if options.results is not None:
        run_ranks(options, cases)
        return 0
    try:
        spec = model_shape.read_shape(options.shape, options.layers)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return start_cases(options, spec, cases)


def start_cases(options: argparse.Namespace, spec: ModelSpec, cases: Sequence[Case]) -> int:
    """Runs all cases, those of one world size on the same ranks, which are started anew after a case that fails."""
    waiting, failures = [], 0
    for case in cases:
        try:
            check_layout(spec.shape, case.layout(spec))
            waiting.append(case)
        except UserError as error:
            failures += 1
            print(f"summary: {case}: not run: {error}", flush=True)
    waiting.sort(key=lambda case: case.training.world_size)
    for world, group in groupby(waiting, key=lambda case: case.training.world_size):
        left = list(group)
        while left:
            code, told = start_ranks(options, world, left)
            failures += sum(not each["is_right"] for each in told)
            left = left[len(told) :]
            if left and code:
                failures += 1
                print(f"summary: {left[0]}: failed, the ranks ended with exit code {code}", flush=True)
                left = left[1:]
            assert left == [] or code, f"the ranks ended well and said nothing of {left[0]}"
    return min(failures, 1)


def start_ranks(options: argparse.Namespace, world: int, cases: Sequence[Case]) -> tuple[int, list[dict[str, Any]]]:
    """Runs cases on so many ranks; torchrun's exit code, and what was found for each case that came to its end."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.jsonl"
        results.touch()
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world}", "--master-port=0"]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", __file__, *map(str, cases)]
        for name in ("shape", "layers", "dtype", "engine", "bucket_mib", "repeats"):
            value = getattr(options, name)
            command += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
        environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        code = subprocess.run([*command, "--results", str(results)], env=environment, check=False).returncode
        return code, [json.loads(line) for line in results.read_text().splitlines()]


def run_ranks(options: argparse.Namespace, cases: Sequence[Case]) -> None:
    """The cases as this rank, a mesh for each training layout; the first rank writes what it finds, case by case."""
    spec = model_shape.read_shape(options.shape, options.layers)
    for training, group in groupby(cases, key=lambda case: case.training):
        of_layout = list(group)
        mesh = start_mesh(of_layout[0].layout(spec), seed=0, timeout=timedelta(minutes=5))
        model = build_model(spec, mesh, dtype=getattr(torch, options.dtype), layers="torch", head="lm")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.02)
        for case in of_layout:
            figures = measure(options, GenerationGrid(training, case.generation), model, spec, mesh)
            if mesh.is_writer:
                wrong = tell(options, case, figures, spec)
                with options.results.open("a") as results:
                    results.write(json.dumps({"case": str(case), "is_right": not wrong, "wrong": wrong}) + "\n")
        parallel_state.destroy_model_parallel()
    stop_mesh()


@dataclass(frozen=True)
class Figures:
    """What one case showed, bytes of all ranks together; seconds of each repeat."""

    grid: GenerationGrid
    account: Account
    planned: Account
    formulas: dict[WeightClass, Formula]
    no_formula: dict[WeightClass, str]
    naive: Counter[WeightClass]
    busiest: int
    extra: int
    naive_peak: int
    seconds: list[float]
    naive_seconds: list[float]
    link: float


def measure(
    options: argparse.Namespace, grid: GenerationGrid, model: nn.Module, spec: ModelSpec, mesh: Mesh
) -> Figures:
    """Switches, and gathers whole tensors, some times over; every rank returns the same."""
    made = NativeSwitch if options.engine == "native" else TensorSwitch
    switch: Measured = made(model, spec, mesh, grid, int(options.bucket_mib * 2**20))
    switch.run()  # the first one also sets things up
    moved, extra = run_counted(switch)
    account, planner = switch.account(moved), switch.planner
    seconds = []
    for _ in range(options.repeats):
        switch.release()
        seconds.append(timed(switch.run, mesh))
    switch.release()
    naive_moved = Moved()

    def gather_everything() -> None:
        for _ in hf_tensors(model, spec, mesh, naive_moved):
            pass

    gather_everything()
    naive = Counter(naive_moved.received_by_class)
    naive_seconds = [timed(gather_everything, mesh) for _ in range(options.repeats)]
    found = (account, account_of(planner, mesh.rank), naive, moved.received, extra, naive_moved.peak_bytes)
    accounts, planned, gathered, received, extras, peaks = zip(*gather_objects(found, mesh.world_group), strict=True)
    return Figures(
        grid=grid,
        account=sum(accounts, Account()),
        planned=sum(planned, Account()),
        formulas={name: formula_of(planner, name, grid.tp) for name in CLASSES},
        no_formula={name: why_no_formula(name, options.engine, spec, grid) for name in CLASSES},
        naive=sum(gathered, Counter()),
        busiest=max(received),
        extra=max(extras),
        naive_peak=max(peaks),
        seconds=seconds,
        naive_seconds=naive_seconds,
        link=link_speed(mesh, options.repeats),
    )


def run_counted(switch: Measured) -> tuple[Moved, int]:
    """One run, and the most bytes that it held beyond what it left."""
    switch.release()
    if runtime.on_cpu:
        moved = switch.run()
        return moved, moved.peak_bytes
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    moved = switch.run()
    torch.cuda.synchronize()
    return moved, torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()


def apart(figures: Figures) -> list[str]:
    """What is not as the formulas say, and as the plan says where there is no formula."""
    wrong, world = [], figures.grid.training.world_size
    for name in CLASSES:
        held, formula, planned = figures.account.classes[name], figures.formulas[name], figures.planned.classes[name]
        expected = {
            "received": formula.received * world,
            "redundant": formula.redundant * world,
            "peak": formula.peak * world + planned.copied,  # a copy exists twice
        }
        if figures.no_formula[name]:
            expected = {"received": planned.received, "redundant": planned.redundant, "peak": planned.peak}
        for column, value in {**expected, "copied": planned.copied}.items():
            measured = getattr(held, column)
            if measured != value:
                wrong.append(f"{name} {column} {measured:,} for {float(value):,.0f}")
    return wrong


def tell(options: argparse.Namespace, case: Case, figures: Figures, spec: ModelSpec) -> list[str]:
    """Prints the case; what of it is wrong."""
    account, world = figures.account, case.training.world_size
    training, size = layout_text(case.training), case.generation
    print(f"\n{options.shape} {options.dtype}, {training} → replicas of {size} ({options.engine}), bytes of all ranks")
    print(f"{'class':<12}" + "".join(f"{name:>16}" for name in COLUMNS))
    for name in CLASSES:
        held, formula = account.classes[name], figures.formulas[name]
        if formula.whole:
            by_formula = [float(each * world) for each in (formula.received, formula.peak, formula.redundant)]
            row = [held.received, by_formula[0], figures.naive[name], held.peak, by_formula[1]]
            row += [held.redundant, by_formula[2], held.copied]
            print(f"{name:<12}" + "".join(f"{figure:>16,.0f}" for figure in row))
            if figures.no_formula[name]:
                print(f"{'':<12}no formula: {figures.no_formula[name]}; held against the plan")
    median, naive_median = statistics.median(figures.seconds), statistics.median(figures.naive_seconds)
    speed = figures.busiest / median
    print(
        f"switch {median * 1e3:.2f} ms ({min(figures.seconds) * 1e3:.2f} to {max(figures.seconds) * 1e3:.2f}), "
        f"{speed / 1e9:.2f} GB/s into the busiest rank; extra memory {figures.extra:,} B; "
        f"whole tensors {naive_median * 1e3:.2f} ms, {figures.naive_peak:,} B; ratio {naive_median / median:.2f}"
    )
    print(link_text(world, figures.link, speed))
    wrong, planned = apart(figures), [name for name in CLASSES if figures.no_formula[name]]
    right = f"by formula, {' and '.join(planned)} by the plan" if planned else "by formula"
    print(
        f"summary: {training} → {size}: {account.total.received:,} B received, "
        f"{right if not wrong else 'NOT by formula: ' + ', '.join(wrong)}; {median * 1e3:.2f} ms, "
        f"{speed / 1e9:.1f} GB/s = {speed / figures.link:.2f} of the link; {figures.extra / 2**20:.1f} MiB of "
        f"extra memory; whole tensors take {naive_median / median:.1f} times as long",
        flush=True,
    )  # fmt: skip
    return wrong


if __name__ == "__main__":
    sys.exit(main())
