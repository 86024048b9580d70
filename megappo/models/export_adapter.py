"""This rank's adapters → a folder in PEFT's format: adapter_config.json and adapter_model.safetensors.

The whole model with the adapters in it is written by `export_hf.py`.
"""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from megappo.config.lora import LoraConfig
from megappo.models.adapter_map import (
    PEFT_EXPERTS_GATE_UP,
    AdapterTarget,
    adapter_map,
    adapter_targets,
    missing_expert_tensors,
    peft_targets,
)
from megappo.models.architecture import ModelSpec
from megappo.models.attach_lora import Merge, attached_lora
from megappo.models.export_hf import agreed_head, gathered, prepare_folder
from megappo.models.hf_folder import ADAPTER_WEIGHTS, copy_companions
from megappo.models.stage_parameters import stage_parameters
from megappo.models.weight_map import Head, Rule, WeightMap
from megappo.parallel.collectives import gather_objects
from megappo.parallel.mesh import Mesh

CONFIG = "adapter_config.json"


@torch.no_grad()
def export_adapter(model: nn.Module, spec: ModelSpec, mesh: Mesh, out_folder: str | Path) -> None:
    """Writes the adapters of `model`, a bare stage, to `out_folder`, with the tokenizer; a value head is among them.

    Every rank of the mesh calls it. The folder appears only when complete. Raises DataError, on every rank, where it
    exists and is not empty.
    """
    lora = attached_lora(model)
    assert lora is not None, "the model has no adapters"
    out = Path(out_folder)
    partial = out.with_name(f".{out.name}.partial")
    prepare_folder(out, partial, mesh)
    head = agreed_head(model, mesh)
    base = spec.family.weight_map(spec.shape, head)
    targets = adapter_targets(base, lora.target_modules)
    weight_map = adapter_map(base, targets, lora, head)
    merge = Merge(model)
    mine: dict[str, Tensor] = {}
    for parameter in stage_parameters(model, weight_map, is_partial=True):
        put_rows(mine, parameter.rule, gathered(parameter, mesh, merge), weight_map)
    # Adapters are small: the writer takes them all.
    parts = gather_objects(mine, mesh.world_group)
    if mesh.is_writer:
        tensors = {name: tensor for part in parts for name, tensor in part.items()}
        assert set(tensors) == set(weight_map.tensors), "an export writes every tensor of the adapters, once"
        dtype = next(iter(tensors.values())).dtype
        missing = missing_expert_tensors(base, weight_map, lora.rank)
        tensors |= {name: torch.zeros(shape, dtype=dtype) for name, shape in missing.items()}
        save_file(tensors, partial / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        copy_companions(spec.folder, partial)
        (partial / "config.json").unlink(missing_ok=True)  # the folder is no model: PEFT takes that from the base
        (partial / CONFIG).write_text(json.dumps(peft_config(spec, lora, targets, head), indent=2) + "\n")
        if out.exists():
            out.rmdir()
        partial.rename(out)
    if mesh.world_size > 1:
        dist.barrier()


def put_rows(tensors: dict[str, Tensor], rule: Rule, shards: Sequence[Tensor], weight_map: WeightMap) -> None:
    """Writes the rows of an adapter's parameter, of which `shards` are all TP ranks', into PEFT's tensors.

    A projection that is several blocks of its layer has its B in several parameters.
    """
    axis = rule.axis or 0
    for tp_rank, shard in enumerate(shards):
        offset = 0
        for segment in rule.shard(len(shards), tp_rank):
            if segment.source is not None:
                shape = weight_map.tensors[segment.source]
                whole = tensors.setdefault(segment.source, torch.zeros(shape, dtype=shard.dtype))
                rows = shard.narrow(axis, offset, segment.length)
                whole.narrow(axis, segment.start, segment.length).copy_(rows)
            offset += segment.length


def peft_config(spec: ModelSpec, lora: LoraConfig, targets: tuple[AdapterTarget, ...], head: Head) -> dict[str, Any]:
    """adapter_config.json, as `peft.LoraConfig` reads it."""
    named = peft_targets(spec.family.weight_map(spec.shape, head), targets)
    parameters: dict[str, Any] = {}
    if named.parameters:
        parameters["target_parameters"] = named.parameters
    if named.has_experts:
        # Fused, gate's and up's adapters are one of twice the rank, with the same alpha / rank.
        pattern = rf".*\.{re.escape(PEFT_EXPERTS_GATE_UP)}"
        parameters |= {"rank_pattern": {pattern: 2 * lora.rank}, "alpha_pattern": {pattern: 2 * lora.alpha}}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if head == "lm" else "SEQ_CLS",
        "base_model_name_or_path": str(spec.folder),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": named.modules,
        **parameters,
        "modules_to_save": ["score"] if head == "value" else None,
        "use_dora": lora.type == "dora",
        "use_rslora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
