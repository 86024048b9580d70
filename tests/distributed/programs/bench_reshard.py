"""Cases of tools/bench_reshard.py on these ranks, whole and broken. Arguments: RUNS (JSON) --out FILE.

A run is {arguments: words of the command line, breaks: null, "aliases" or "received"}. Its result has what the first
rank printed and what it found. `aliases`: tensors that should be the training shards' memory are copies of it;
`received`: a rank counts a row of 128 float32 more than it got.
"""

import argparse
import contextlib
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

import torch.distributed as dist

from megappo.engines.hybrid.execute import Moved, Switch
from tests.support.tools import load_tool

bench = load_tool("bench_reshard")
import switches  # noqa: E402  beside the tool, which is on the path now


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=json.loads)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    # torchrun's store does not take a second default group with the same names: it stays.
    stop, bench.stop_mesh = bench.stop_mesh, lambda: None
    found = []
    for number, run in enumerate(arguments.runs):
        results = arguments.out.with_name(f"{number}.jsonl")
        with broken(run["breaks"]), contextlib.redirect_stdout(io.StringIO()) as printed:
            assert bench.main([*run["arguments"], "--results", str(results)]) == 0
        lines = results.read_text().splitlines() if results.exists() else []
        found.append({"printed": printed.getvalue(), "results": [json.loads(line) for line in lines]})
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(found))
    stop()


@contextlib.contextmanager
def broken(kind: str | None) -> Iterator[None]:
    alias, run = switches.PlainTensors.alias, Switch.run
    if kind == "aliases":
        switches.PlainTensors.alias = _copied
    elif kind == "received":
        Switch.run = _counting_more(run)  # type: ignore[method-assign]
    try:
        yield
    finally:
        switches.PlainTensors.alias, Switch.run = alias, run  # type: ignore[method-assign]


def _copied(destination: Any, transfer: Any, views: Any) -> None:
    destination.tensors[transfer.target_name] = views[0].clone()


def _counting_more(run: Callable[[Switch], Moved]) -> Callable[[Switch], Moved]:
    def counted(switch: Switch) -> Moved:
        moved = run(switch)
        if dist.get_rank() == 1:
            moved.received_by_class["vocabulary"] += 128 * 4
        return moved

    return counted


if __name__ == "__main__":
    main()
