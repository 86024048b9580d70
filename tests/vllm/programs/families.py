"""Switches and generates with one vLLM engine after the other, a model each: greedy log-probs against the trainer's.

Its process writes a list of what came out, in the order of `--models`.
"""

import argparse
import json
import logging
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from megappo.config.layout import LayoutConfig
from megappo.config.rollout import RolloutConfig
from megappo.engines import vllm_rollout
from megappo.parallel.mesh import Mesh, start_mesh, stop_mesh
from tests.vllm.programs.switch import GREEDY, setup


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--weights", choices=["auto", "load", "direct"], required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    said = Said()
    vllm_rollout._log.setLevel(logging.INFO)
    vllm_rollout._log.addHandler(said)
    mesh = start_mesh(LayoutConfig(), seed=0, timeout=timedelta(minutes=2))
    results = [switched(folder, mesh, arguments.weights) for folder in arguments.models]
    results = [result | {"said": line} for result, line in zip(results, said.lines, strict=True)]
    arguments.out.write_text(json.dumps(results))
    stop_mesh()


class Said(logging.Handler):
    """Keeps the lines of a log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def switched(folder: Path, mesh: Mesh, weights: Literal["auto", "load", "direct"]) -> dict[str, Any]:
    """Largest differences of log-probs from the trainer's: with the imported weights, of those after an update of the
    trainer alone, and after its switch."""
    on = setup(folder, mesh, RolloutConfig(engine="vllm", max_num_seqs=8, max_num_batched_tokens=64), weights)
    on.engine.sync_weights()
    first = on.generate(GREEDY)
    imported = on.difference(first)
    on.engine.release()
    on.update()
    report = on.engine.sync_weights()
    result = {
        "imported": imported,
        "stale": on.difference(first),
        "update": on.difference(on.generate(GREEDY)),
        "worst tensor": str(on.engine.worst_tensor()),
        "aliased": report.bytes_aliased,
        "copied": report.bytes_copied,
        "weight bytes": sum(parameter.nbytes for parameter in on.model.parameters()),
    }
    on.engine.close()
    return result


if __name__ == "__main__":
    main()
