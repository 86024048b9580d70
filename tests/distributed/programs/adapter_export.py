"""Adapters of a folder, read on several layouts and written again, and what ranks receive and hold meanwhile."""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

import argparse
import json
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megappo.config.layout import LayoutConfig
from megappo.config.lora import LoraConfig
from megappo.models import export_adapter as module
from megappo.models.attach_lora import attach_lora
from megappo.models.build import build_model, read_model
from megappo.models.import_adapter import import_adapter
from megappo.models.spec import Experts
from megappo.models.weight_map import Head
from megappo.parallel.collectives import gather_objects
from megappo.parallel.mesh import start_mesh, stop_mesh

RANK = 3
LORA = LoraConfig(rank=RANK)
DORA = LoraConfig(rank=RANK, type="dora")
SOME = LoraConfig(rank=RANK, target_modules=("q_proj", "v_proj", "down_proj"))


@dataclass(frozen=True)
class Case:
    """A model on four ranks and what its adapters are; they are read from the folder `source`."""

    model: str
    layout: LayoutConfig
    lora: LoraConfig = LORA
    head: Head = "lm"
    experts: Experts = "grouped"
    dtype: torch.dtype = torch.float32

    @property
    def source(self) -> str:
        return f"{self.model}-{self.head}-{self.lora.type}-{len(self.lora.target_modules)}-{self.dtype.itemsize}"


CASES = {
    "tp2 pp2": Case("dense", LayoutConfig(tp=2, pp=2), DORA, dtype=torch.bfloat16),
    "dp2 pp2, value head": Case("dense", LayoutConfig(pp=2), head="value"),
    "tp2 pp2, uneven stages": Case(
        "dense",
        LayoutConfig(tp=2, pp=2, num_layers_in_first_pipeline_stage=1, num_layers_in_last_pipeline_stage=3),
        SOME,
        "value",
        dtype=torch.bfloat16,
    ),
    "tp2 pp2 ep2": Case("moe", LayoutConfig(tp=2, pp=2, ep=2)),
    "tp2 dp2 ep2 etp2": Case("moe", LayoutConfig(tp=2, ep=2, etp=2), SOME),
    "tp4 ep2 etp2, modules": Case("moe", LayoutConfig(tp=4, ep=2, etp=2), experts="sequential"),
}


class Watch:
    """What this rank is sent by others, and the most that it holds of tensors that are not yet whole."""

    def __init__(self) -> None:
        self.received = self.held = 0
        self.gathered_everywhere = 0
        receive, put_rows, gather = dist.recv, module.put_rows, dist.all_gather_object

        def watched_receive(tensor: Any, *rest: Any, **options: Any) -> Any:
            self.received += tensor.nbytes
            return receive(tensor, *rest, **options)

        def watched_rows(tensors: Any, *rest: Any) -> None:
            put_rows(tensors, *rest)
            self.held = max(self.held, sum(tensor.nbytes for tensor in tensors.values()))

        def watched_gather(*rest: Any, **options: Any) -> Any:
            self.gathered_everywhere += 1
            return gather(*rest, **options)

        dist.recv, module.put_rows, dist.all_gather_object = watched_receive, watched_rows, watched_gather

    def taken(self) -> dict[str, int]:
        found = {"received": self.received, "held": self.held, "gathered everywhere": self.gathered_everywhere}
        self.received = self.held = self.gathered_everywhere = 0
        return found


def run_case(folder: Path, name: str, case: Case, watch: Watch) -> list[dict[str, int]]:
    mesh = start_mesh(case.layout, seed=0, timeout=timedelta(seconds=60))
    spec = read_model(folder / case.model)
    model = build_model(spec, mesh, dtype=case.dtype, layers="torch", head=case.head, experts=case.experts)
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    attach_lora(model, spec, mesh, case.lora, case.head, seed=0)
    import_adapter(model, spec, mesh, folder / case.source, case.head, "model.lora")
    watch.taken()
    module.export_adapter(model, spec, mesh, folder / name)
    found = gather_objects(watch.taken(), mesh.world_group)
    parallel_state.destroy_model_parallel()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    watch = Watch()
    results = {name: run_case(arguments.folder, name, case, watch) for name, case in CASES.items()}
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(results))
    stop_mesh()


if __name__ == "__main__":
    main()
