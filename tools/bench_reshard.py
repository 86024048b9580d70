"""Measures the switch between any two layouts on real ranks, beside the formulas and beside gathering whole tensors.

    python tools/bench_reshard.py --shape tiny-llama 1-4-1:2,1 2-2-2:4,2,1
    python tools/bench_reshard.py --shape tiny-qwen3-moe 1-1-2@ep2:2,1
    python tools/bench_reshard.py --shape qwen2.5-1.5b --dtype bfloat16 --engine vllm 1-2-1:1      (on 2 GPUs)

A case is p-t-d:g[,g…]: the training layout (pipeline, tensor, data-parallel; @epN[,etpM] for experts) and the sizes of
the generation replicas. Ranks are started here, on GPUs where there are any, otherwise on CPUs with gloo. Weights are
random. `--engine vllm` fills tensors of vLLM's shapes; vLLM itself is not needed. The machine's noise is in seconds:
compare ratios, whose two figures are of one run.

What a link gives is measured beside it: every rank sends one large message to the next rank while it takes one from the
rank before, so that each link is busy in both directions. "Of the link" is the bytes that the busiest rank takes in a
switch, over the whole switch's time, as a share of that speed. A switch also copies inside a GPU and sends many tensors
in buckets; a rank that takes from several others at once has more than one link where GPUs are switched (NVLink), so
that the share can be above 1.
"""

import argparse
import math
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import megappo.parallel.runtime as runtime  # isort: skip  before megatron

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from megappo.config.grid import GenerationGrid, TrainingGrid
from megappo.config.layout import LayoutConfig
from megappo.engines.hybrid.account import CLASSES, Account, account_of, formula_of
from megappo.engines.hybrid.execute import Moved, Switch
from megappo.engines.hybrid.kinds import Kinds, with_numbers
from megappo.engines.hybrid.layout_text import layout_text, parse_layout
from megappo.engines.hybrid.messages import Views
from megappo.engines.hybrid.native import HybridTransfer
from megappo.engines.hybrid.plan import Planner, even_stages
from megappo.engines.hybrid.sources import TrainingShards
from megappo.engines.hybrid.stream import hf_tensors
from megappo.engines.hybrid.targets import Target
from megappo.engines.hybrid.transfers import Transfer
from megappo.engines.hybrid.weights import GenerationWeights
from megappo.engines.vllm.targets import VLLMTargets
from megappo.errors import UserError
from megappo.models.architecture import ModelSpec
from megappo.models.build import build_model
from megappo.models.families import FAMILIES
from megappo.models.families.published import PUBLISHED
from megappo.parallel.collectives import gather_objects
from megappo.parallel.mesh import Mesh, start_mesh, stop_mesh

LINK_BYTES = 16 * 2**20
COLUMNS = ("received", "formula", "naive", "peak", "formula", "redundant", "formula", "copied")


@dataclass(frozen=True)
class Case:
    training: TrainingGrid
    generation: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> "Case":
        """Raises ValueError, which argparse shows, for a text that is no case."""
        layout, _, sizes = text.partition(":")
        training = parse_layout(layout)
        generation = tuple(int(size) for size in sizes.split(","))
        try:
            for size in generation:
                GenerationGrid(training, size)
        except UserError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return cls(training, generation)


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", type=Case.parse, metavar="p-t-d:g", help="layouts, such as 2-2-2:4,2,1")
    parser.add_argument("--shape", default="tiny-llama", choices=sorted(set(PUBLISHED) - {"deepseek-v3"}))
    parser.add_argument("--layers", type=int, help="another number of layers than the shape has")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--engine", default="native", choices=("native", "vllm"), help="whose parameters are filled")
    parser.add_argument("--bucket-mib", type=float, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.ranks:
        run_ranks(options)
        return 0
    for world in sorted({case.training.world_size for case in options.cases}):
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world}", "--master-port=0"]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", __file__, *given, "--ranks", str(world)]
        environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        code = subprocess.run(command, env=environment, check=False).returncode
        if code:
            return code
    return 0


def run_ranks(options: argparse.Namespace) -> None:
    """The cases of this world size, one mesh after the other."""
    for case in options.cases:
        if case.training.world_size != options.ranks:
            continue
        sizes, config = case.training, dict(PUBLISHED[options.shape])
        if options.layers:
            config["num_hidden_layers"] = options.layers
        family = FAMILIES[config["model_type"]]
        shape = family.shape(config)
        layout = LayoutConfig(
            tp=sizes.tp, pp=sizes.pp, ep=sizes.ep, etp=sizes.etp,
            sequence_parallel=shape.moe is not None and sizes.tp > 1,
        )  # fmt: skip
        mesh = start_mesh(layout, seed=0, timeout=timedelta(minutes=5))
        spec = ModelSpec(family, shape, Path("."), config)
        model = build_model(spec, mesh, dtype=getattr(torch, options.dtype), layers="torch", head="lm")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.02)
        for generation in case.generation:
            measure(options, case, GenerationGrid(sizes, generation), model, spec, mesh)
        parallel_state.destroy_model_parallel()
    stop_mesh()


class PlainTensors:
    """A destination of tensors with an engine's names and shapes, for `--engine vllm`."""

    def __init__(self, targets: Sequence[Target], dtype: torch.dtype, device: torch.device) -> None:
        self.tensors: dict[str, Tensor] = {}
        for target in targets:
            rows = (target.length,) if target.width is None else (target.length, target.width)
            shape = rows if target.axis == 0 else rows[::-1]
            shape = shape if target.experts is None else (len(target.experts), *shape)
            for layer in target.layers:
                name = with_numbers(target.name, layer)
                self.tensors[name] = torch.zeros(shape, dtype=dtype, device=device)

    def alias(self, transfer: Transfer, views: Views) -> None:
        self.tensors[transfer.target_name] = views[0]

    def is_alias(self, transfer: Transfer, views: Views) -> bool:
        return self.tensors[transfer.target_name].data_ptr() == views[0].data_ptr()

    def has_moved(self) -> bool:
        return False

    def current(self, transfer: Transfer) -> Views:
        return (self.view(transfer),)

    def view(self, transfer: Transfer) -> Tensor:
        tensor, axis, run = self.tensors[transfer.target_name], transfer.axis, transfer.experts
        if run is not None:
            tensor, axis = tensor.narrow(0, run.target_place, run.count), axis + 1
        return tensor.narrow(axis, transfer.target_offset, transfer.length)


def make_switch(
    options: argparse.Namespace, grid: GenerationGrid, model: nn.Module, spec: ModelSpec, mesh: Mesh
) -> tuple[Planner, Callable[[], Moved]]:
    """The plan, and a function that carries it out."""
    bucket_bytes = int(options.bucket_mib * 2**20)
    if options.engine == "native":
        transfer = HybridTransfer(model, spec, mesh, grid, GenerationWeights(), bucket_bytes)

        def switch() -> Moved:
            transfer.run()
            return transfer.moved

        return transfer.planner, switch
    weight_map = spec.family.weight_map(spec.shape, "lm")
    kinds, sources = Kinds.of(weight_map), TrainingShards(model, weight_map)
    targets = VLLMTargets(kinds, spec.shape, grid, expert_parallel=mesh.ep > 1)
    dtype = next(model.parameters()).dtype
    planner = Planner(
        kinds,
        grid.training,
        targets,
        layers_of_stages=even_stages(spec.shape.num_layers, grid.training.pp),
        element_bytes=dtype.itemsize,
        bucket_bytes=bucket_bytes,
        generation_tp=grid.tp,
        grouped_experts=sources.has_grouped_experts,
    )
    destination = PlainTensors(targets.of(mesh.rank), dtype, mesh.device)
    return planner, Switch(planner, mesh.rank, sources, destination, mesh.world_group).run


def measure(
    options: argparse.Namespace, case: Case, grid: GenerationGrid, model: nn.Module, spec: ModelSpec, mesh: Mesh
) -> None:
    planner, switch = make_switch(options, grid, model, spec, mesh)
    moved = switch()  # the first one also sets things up
    seconds = [timed(switch, mesh) for _ in range(options.repeats)]
    naive_moved = Moved()

    def gather_everything() -> None:
        for _ in hf_tensors(model, spec, mesh, naive_moved):
            pass

    gather_everything()
    naive_seconds = [timed(gather_everything, mesh) for _ in range(options.repeats)]
    rounds, link = options.repeats + 1, link_speed(mesh, options.repeats)
    ranks = gather_objects(
        (account_of(planner, mesh.rank), moved, naive_moved.received_by_class, naive_moved.peak_bytes),
        mesh.world_group,
    )
    if not mesh.is_writer:
        return
    account = sum((planned for planned, *_ in ranks), Account())
    received = sum((each.received_by_class for _, each, *_ in ranks), Counter())
    naive = sum((each for _, _, each, _ in ranks), Counter())
    world, training = mesh.world_size, layout_text(case.training)
    print(
        f"\n{options.shape} {options.dtype}, {training} → replicas of {grid.tp} ({options.engine}), bytes of all ranks"
    )
    print(f"{'class':<12}" + "".join(f"{name:>16}" for name in COLUMNS))
    for name in CLASSES:
        held, formula = account.classes[name], formula_of(planner, name, grid.tp)
        if formula.whole:
            by_formula = [float(each * world) for each in (formula.received, formula.peak, formula.redundant)]
            figures = [received[name], by_formula[0], naive[name] // rounds, held.peak, by_formula[1]]
            figures += [held.redundant, by_formula[2], held.copied]
            print(f"{name:<12}" + "".join(f"{figure:>16,.0f}" for figure in figures))
    busiest, staging = max(each.received for _, each, *_ in ranks), max(each.peak_bytes for _, each, *_ in ranks)
    median, naive_median = statistics.median(seconds), statistics.median(naive_seconds)
    print(
        f"switch {median * 1e3:.2f} ms ({min(seconds) * 1e3:.2f} to {max(seconds) * 1e3:.2f}), "
        f"{busiest / median / 1e9:.2f} GB/s into the busiest rank; staging {staging:,} B; "
        f"whole tensors {naive_median * 1e3:.2f} ms, {max(peak for *_, peak in ranks):,} B; "
        f"ratio {naive_median / median:.2f}"
    )
    print(link_text(world, link, busiest / median))
    expected = {name: float(formula_of(planner, name, grid.tp).received * world) for name in CLASSES}
    apart = [
        f"{name} {received[name]:,} for {expected[name]:,.0f}"
        for name in CLASSES
        if abs(received[name] - expected[name]) > 0.5
    ]
    print(
        f"summary: {training} → {grid.tp}: {sum(received.values()):,} B received, "
        f"{'by formula' if not apart else 'NOT by formula: ' + ', '.join(apart)}; {median * 1e3:.2f} ms, "
        f"{busiest / median / 1e9:.1f} GB/s = {busiest / median / link:.2f} of the link; {staging / 2**20:.1f} MiB of "
        f"staging; whole tensors take {naive_median / median:.1f} times as long",
        flush=True,
    )  # fmt: skip


def link_text(world_size: int, link: float, speed: float) -> str:
    """What the share of the link compares."""
    if world_size == 1:
        return "link: none, with one rank"
    return (
        f"link: {link / 1e9:.2f} GB/s into each rank while all {world_size} send one large message to the next rank "
        f"and take one from the rank before; the switch's {speed / 1e9:.2f} GB/s, copies and all, are "
        f"{speed / link:.2f} of that"
    )


def link_speed(mesh: Mesh, repeats: int) -> float:
    """Bytes a second into each rank while all send to their neighbour at once, in large messages; median."""
    size = LINK_BYTES if runtime.on_cpu else 16 * LINK_BYTES
    given, taken = (torch.zeros(size, dtype=torch.uint8, device=mesh.device) for _ in range(2))
    after, before = (mesh.rank + 1) % mesh.world_size, (mesh.rank - 1) % mesh.world_size

    def exchange() -> None:
        both = [dist.P2POp(dist.isend, given, after), dist.P2POp(dist.irecv, taken, before)]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    if mesh.world_size == 1:
        return math.inf
    exchange()
    return size / statistics.median(timed(exchange, mesh) for _ in range(repeats))


def timed(run: Callable[[], object], mesh: Mesh) -> float:
    """Seconds until the slowest rank is done."""
    synchronize()
    dist.barrier()
    start = time.perf_counter()
    run()
    synchronize()
    return max(gather_objects(time.perf_counter() - start, mesh.world_group))


def synchronize() -> None:
    if not runtime.on_cpu:
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
