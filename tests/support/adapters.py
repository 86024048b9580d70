"""Adapters with numbers in them, the same on every layout: a new one has B = 0, and then A has no gradient."""

import hashlib

import torch
from torch import nn

from megappo.models.adapter_map import adapter_map, adapter_targets
from megappo.models.architecture import ModelSpec
from megappo.models.attach_lora import attached_lora
from megappo.models.import_hf import head_of
from megappo.models.stage_parameters import stage_parameters
from megappo.parallel.mesh import Mesh


@torch.no_grad()
def fill_adapters(model: nn.Module, spec: ModelSpec, mesh: Mesh, seed: int = 0, size: float = 0.1) -> None:
    """Adds `size` times a normal number to each element of B, and of DoRA's lengths; does nothing without adapters."""
    lora = attached_lora(model)
    if lora is None:
        return
    base = spec.family.weight_map(spec.shape, head_of(model))
    weight_map = adapter_map(base, adapter_targets(base, lora.target_modules), lora, "lm")
    for item in stage_parameters(model, weight_map, is_partial=True):
        if ".lora_A." in item.name:
            continue
        start = 0
        for segment in item.shard(mesh):
            if segment.source is not None:
                key = int.from_bytes(hashlib.sha256(f"{seed} {segment.source}".encode()).digest()[:7], "little")
                noise = torch.randn(weight_map.tensors[segment.source], generator=torch.Generator().manual_seed(key))
                item.tensor[start : start + segment.length] += size * noise[segment.start :][: segment.length]
            start += segment.length


def random_tokens() -> torch.Tensor:
    """[2, 20], the same everywhere."""
    return torch.randint(4, 99, (2, 20), generator=torch.Generator().manual_seed(0))
