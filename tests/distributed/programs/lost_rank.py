"""A rank is killed in the middle of a switch: what do the others say, and when?

Run on bare processes, not by a launcher that would end the others: rank by rank, `--folder MODEL --out FOLDER`, and
`--whole` where whole tensors are streamed, as into an engine's own loader.
"""

import argparse
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

import torch

from megappo.config.grid import GenerationGrid
from megappo.config.layout import LayoutConfig
from megappo.engines.hybrid import execute
from megappo.engines.hybrid.execute import Moved
from megappo.engines.hybrid.native import HybridTransfer
from megappo.engines.hybrid.stream import hf_tensors
from megappo.engines.hybrid.weights import GenerationWeights
from megappo.models.build import build_model, read_model
from megappo.models.import_hf import import_hf
from megappo.parallel.mesh import start_mesh

TIMEOUT = timedelta(seconds=20)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--whole", action="store_true")
    arguments = parser.parse_args()
    mesh = start_mesh(LayoutConfig(tp=int(os.environ["WORLD_SIZE"])), seed=0, timeout=TIMEOUT)
    spec = read_model(arguments.folder)
    model = build_model(spec, mesh, dtype=torch.float32, layers="torch", head="lm")
    import_hf(model, spec, mesh)

    def stream() -> None:
        for number, _ in enumerate(hf_tensors(model, spec, mesh, Moved())):
            if stream in dying and number == 10:
                os.kill(os.getpid(), signal.SIGKILL)

    dying: list[Callable[[], object]] = []
    run: Callable[[], object] = stream
    if not arguments.whole:
        grid = GenerationGrid(mesh.training_grid, 1)
        run = HybridTransfer(model, spec, mesh, grid, GenerationWeights(), bucket_bytes=1 << 14).run
    run()
    if mesh.rank == 1:
        dying.append(run)
        die_after_two_buckets()
    start = time.monotonic()
    try:
        run()
        outcome = "nothing happened"
    except execute.SwitchError as error:
        outcome = str(error)
    (arguments.out / f"rank-{mesh.rank}").write_text(f"{time.monotonic() - start:.1f}\n{outcome}\n")
    os._exit(0)  # the groups can't be left in order any more


def die_after_two_buckets() -> None:
    """Has this process killed when it begins its third bucket."""
    post, begun = execute.Switch._post, []

    def dying(self: execute.Switch, *bucket: Any) -> Any:
        begun.append(bucket)
        if len(begun) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return post(self, *bucket)

    execute.Switch._post = dying  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
