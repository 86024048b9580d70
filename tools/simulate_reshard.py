"""Makes and checks the reshard plans of thousands of ranks, without any of them.

    python tools/simulate_reshard.py --shape qwen3-235b-a22b --train 8-4-32@ep8 --generate 8
    python tools/simulate_reshard.py --shape deepseek-v3 --train 16-8-32@ep64 --generate 32 --every 1

A layout is p-t-d: pipeline, tensor and data-parallel sizes, with @epN or @epN,etpM for the experts. For every rank the
plan is made; every row of every generation parameter has to come from one place, no training row may be taken twice,
and what ranks send has to be what others receive. `--every N` checks every N-th rank alone (and not the sums).
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import model_shape  # beside this file

from megappo.config.grid import GenerationGrid, TrainingGrid
from megappo.engines.hybrid.account import CLASSES, Account, account_of, formula_of
from megappo.engines.hybrid.audit import Auditor
from megappo.engines.hybrid.kinds import Kinds
from megappo.engines.hybrid.layout_text import parse_layout
from megappo.engines.hybrid.plan import Planner, even_stages
from megappo.engines.hybrid.targets import EngineTargets, NativeTargets
from megappo.engines.hybrid.transfers import Transfer, Way
from megappo.engines.vllm.targets import VLLMTargets
from megappo.errors import UserError

BFLOAT16 = 2


@dataclass
class Totals:
    """What all planned ranks do together, in bytes by rank, and the seconds that planning took."""

    account: Account = field(default_factory=Account)
    received: list[int] = field(default_factory=list)
    sent_by_receivers: dict[int, int] = field(default_factory=dict)
    sent_by_senders: dict[int, int] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    transfers: int = 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, help=model_shape.HELP)
    parser.add_argument("--train", required=True, type=parse_layout, help="p-t-d, p-t-d@epN or p-t-d@epN,etpM")
    parser.add_argument("--generate", required=True, type=int, help="ranks of a generation replica")
    parser.add_argument("--engine", choices=("native", "vllm"), default="native", help="whose parameters they become")
    parser.add_argument("--bucket-mib", type=int, default=256)
    parser.add_argument("--every", type=int, default=1, help="plan every N-th rank")
    options = parser.parse_args(arguments)
    try:
        planner, grid = make_planner(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    totals = simulate(planner, options.every)
    print_result(planner, grid, totals, options)
    return 0


def make_planner(options: argparse.Namespace) -> tuple[Planner, GenerationGrid]:
    """The plan of the layouts that were asked for. Raises UserError where they can't be."""
    spec = model_shape.read_shape(options.shape)
    shape = spec.shape
    training: TrainingGrid = options.train
    grid = GenerationGrid(training, options.generate)
    kinds = Kinds.of(spec.family.weight_map(shape, "lm"))
    targets: EngineTargets = NativeTargets(kinds, grid)
    if options.engine == "vllm":
        targets = VLLMTargets(kinds, shape, grid, expert_parallel=training.ep > 1)
    planner = Planner(
        kinds,
        training,
        targets,
        layers_of_stages=even_stages(shape.num_layers, training.pp),
        element_bytes=BFLOAT16,
        bucket_bytes=options.bucket_mib << 20,
        generation_tp=grid.tp,
    )
    return planner, grid


def simulate(planner: Planner, every: int) -> Totals:
    """Plans and checks rank after rank. Raises PlanError at the first fault."""
    totals, world = Totals(), planner.training.world_size
    auditor, shown = Auditor(planner), time.monotonic()
    for rank in range(0, world, every):
        start = time.process_time()  # of this process alone: the machine may be busy
        received, sent = list(planner.receives(rank)), list(planner.sends(rank))
        totals.seconds.append(time.process_time() - start)
        auditor.check(rank, received)
        count(totals, planner, rank, received, sent)
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            print(f"{rank + 1} of {world} ranks", file=sys.stderr, flush=True)
    if every == 1:
        assert totals.sent_by_senders == totals.sent_by_receivers, "what ranks send is what others receive of them"
    return totals


def count(totals: Totals, planner: Planner, rank: int, received: list[Transfer], sent: list[Transfer]) -> None:
    moved = [transfer for transfer in received if transfer.way is Way.GATHER]
    for transfer in moved:
        nbytes = transfer.num_elements * planner.element_bytes
        source = transfer.source_rank
        totals.sent_by_receivers[source] = totals.sent_by_receivers.get(source, 0) + nbytes
    if sent:
        totals.sent_by_senders[rank] = sum(transfer.num_elements for transfer in sent) * planner.element_bytes
    totals.received.append(sum(transfer.num_elements for transfer in moved) * planner.element_bytes)
    totals.transfers += len(received)
    totals.account += account_of(planner, rank, received)


def print_result(planner: Planner, grid: GenerationGrid, totals: Totals, options: argparse.Namespace) -> None:
    training, planned = planner.training, len(totals.received)
    print(
        f"{options.shape}: {training.world_size} ranks, p {training.pp} t {training.tp} d {training.dp} "
        f"ep {training.ep} etp {training.etp} → {grid.num_replicas} {options.engine} replicas of {grid.tp}; "
        f"{planned} ranks planned and checked"
    )
    heads = ("class", "whole", "aliased", "copied", "received", "formula", "redundant", "formula")
    print(f"{heads[0]:<12}" + "".join(f"{head:>14}" for head in heads[1:]) + "   MB, mean of the ranks")
    for name in CLASSES:
        held, formula = totals.account.classes[name], formula_of(planner, name, grid.tp)
        if formula.whole:
            figures = [formula.whole, *(each / planned for each in (held.aliased, held.copied, held.received))]
            figures += [float(formula.received), held.redundant / planned, float(formula.redundant)]
            print(f"{name:<12}" + "".join(f"{figure / 1e6:>14,.1f}" for figure in figures))
    mean = sum(totals.received) / planned
    worst = max(totals.received)
    print(f"received by the worst rank: {worst / 1e6:,.1f} MB, {worst / mean if mean else 1:.3f} of the mean")
    print(
        f"planning a rank: {sum(totals.seconds) / planned * 1e3:.1f} ms in the mean, {max(totals.seconds) * 1e3:.1f} "
        f"ms at worst; {totals.transfers} transfers, {planner.buckets.count} buckets"
    )
    print(f"beyond the parameters a switch takes at most {planner.extra_bytes:,} bytes on any rank")
    print("every row of every generation parameter placed once, no training row taken twice", end="")
    print("; sent = received for every rank" if options.every == 1 else "")


if __name__ == "__main__":
    sys.exit(main())
