"""Exports that end at each change of a name or removal of a file: which model a reader finds then, and later.

Writes for each case what was found after a kill at the first such moment, the second, and so on to the last.
"""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

import argparse
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from megappo.config.checkpoint_names import is_complete, readable
from megappo.config.layout import LayoutConfig
from megappo.config.lora import LoraConfig
from megappo.models.attach_lora import attach_lora, attached_lora
from megappo.models.build import ModelSpec, build_model, read_model
from megappo.models.chunks import StageModel
from megappo.models.export_adapter import export_adapter
from megappo.models.export_hf import export_hf
from megappo.parallel.mesh import Mesh, start_mesh, stop_mesh
from megappo.trainer.export import export_model

CHANGES = ("replace", "rename", "unlink", "rmdir", "symlink")
"""Functions of `os` with which names come and go."""
OLD, NEW = 0.25, 0.5
"""What all trained parameters are in the two exports."""
LORA = LoraConfig(rank=2, alpha=4.0)


class Killed(BaseException):
    """Stands for the end of the process: nothing in the product catches it."""


@contextmanager
def killed_at(call: int) -> Iterator[None]:
    """The process ends in the place of the `call`-th change, from 0."""
    kept = {name: getattr(os, name) for name in CHANGES}
    calls = 0

    def counting(change: Callable[..., None]) -> Callable[..., None]:
        def change_or_die(*words: Any, **more: Any) -> None:
            nonlocal calls
            calls += 1
            if calls > call:
                raise Killed
            change(*words, **more)

        return change_or_die

    for name, change in kept.items():
        setattr(os, name, counting(change))
    try:
        yield
    finally:
        for name, change in kept.items():
            setattr(os, name, change)


def found(path: Path) -> dict[str, Any] | None:
    """The files of the folder that a reader finds, and the numbers in its weights; None where there is none."""
    folder = readable(path)
    if not is_complete(folder):
        return None
    tensors = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    values = {float(value) for one in tensors for tensor in one.values() for value in tensor.unique()}
    return {"files": sorted(file.name for file in folder.iterdir()), "values": sorted(values)}


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@torch.no_grad()
def fill(model: nn.Module, value: float) -> None:
    for parameter in model.parameters():
        parameter.fill_(value)


def at_every_moment(
    folder: Path, read: str, prepare: Callable[[], None], export: Callable[[], None]
) -> list[dict[str, Any]]:
    """What `export` leaves in `folder` where it ends at each moment, and where it is made again after that."""
    moments = []
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        prepare()
        try:
            with killed_at(len(moments)):
                export()
            return moments
        except Killed:
            moment = {"found": found(folder / read)}
        export()
        moments.append(moment | {"later": found(folder / read), "listing": listing(folder)})


def killed_cases(
    folder: Path, model: StageModel, spec: ModelSpec, mesh: Mesh, tokenizer_folder: Path
) -> dict[str, list[dict[str, Any]]]:
    """Of a run's export, the first one and one of the same step; of a folder that `megappo convert` writes."""
    hf, target = folder / "hf", folder / "converted" / "model"

    def export(value: float) -> None:
        fill(model, value)
        export_model(hf, 3, model, spec, mesh, tokenizer_folder)

    def convert() -> None:
        fill(model, NEW)
        write = export_hf if attached_lora(model) is None else export_adapter
        write(model, spec, mesh, target)

    def again() -> None:
        export(NEW)

    return {
        "first": at_every_moment(hf, "latest", lambda: None, again),
        "again": at_every_moment(hf, "latest", lambda: export(OLD), again),
        "new": at_every_moment(target.parent, target.name, lambda: None, convert),
        "empty": at_every_moment(target.parent, target.name, lambda: target.mkdir(parents=True), convert),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    mesh = start_mesh(LayoutConfig(), seed=0, timeout=timedelta(seconds=120))
    result: dict[str, list[dict[str, Any]]] = {}
    for kind in ("whole", "adapters"):
        spec = read_model(arguments.model)
        model = build_model(spec, mesh, dtype=torch.float32, layers="torch", head="lm")
        if kind == "adapters":
            attach_lora(model, spec, mesh, LORA, "lm", seed=0)
        cases = killed_cases(arguments.folder / kind, model, spec, mesh, arguments.tokenizer)
        result |= {f"{kind} {case}": moments for case, moments in cases.items()}
    if mesh.is_writer:
        arguments.out.write_text(json.dumps(result))
    stop_mesh()


if __name__ == "__main__":
    main()
