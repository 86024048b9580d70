"""What a forward pass keeps for its backward pass, with each kind of recompute, and what the backward then gives."""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

import argparse
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from megappo.config.layout import LayoutConfig
from megappo.config.recompute import Recompute
from megappo.models.build import build_model, read_model
from megappo.models.import_hf import import_hf
from megappo.parallel.mesh import Mesh, start_mesh, stop_mesh

LENGTH, BATCH = 24, 2
CASES = {
    "none": Recompute(),
    "core_attn": Recompute("selective", modules=("core_attn",)),
    "mlp": Recompute("selective", modules=("mlp",)),
    "layernorm": Recompute("selective", modules=("layernorm",)),
    "uniform-1": Recompute("full", "uniform", 1),
    "uniform-2": Recompute("full", "uniform", 2),
    "block-1": Recompute("full", "block", 1),
    "block-2": Recompute("full", "block", 2),
}


def kept_bytes(folder: Path, mesh: Mesh, recompute: Recompute) -> dict[str, Any]:
    """Bytes of the storages that a forward pass has kept when it ends, parameters left out; gradients; random state."""
    spec = read_model(folder)
    model = build_model(spec, mesh, dtype=torch.float32, layers="torch", head="lm", recompute=recompute)
    import_hf(model, spec, mesh)
    tokens = (torch.arange(BATCH * LENGTH) % 97).reshape(BATCH, LENGTH)
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    random_state = torch.get_rng_state()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(tokens, torch.arange(LENGTH).expand(BATCH, LENGTH), None)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    # A storage that was emptied (a norm's output that is made again) has no bytes, and no address of its own.
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in kept}
    found = {storage.data_ptr(): storage.nbytes() for storage in storages.values() if storage.nbytes()}
    (output.log_softmax(-1)[..., 7].square().mean()).backward()
    return {
        "bytes": sum(size for address, size in found.items() if address not in own),
        "gradients": [parameter.grad.double().flatten().tolist() for parameter in model.parameters()],
        "random_state_kept": bool(torch.equal(random_state, torch.get_rng_state())),
    }


def frozen_embedding(folder: Path, mesh: Mesh, recompute: Recompute) -> list[list[float] | None]:
    """Gradients where the embedding does not learn."""
    spec = read_model(folder)
    model = build_model(spec, mesh, dtype=torch.float32, layers="torch", head="lm", recompute=recompute)
    import_hf(model, spec, mesh)
    model.embedding.requires_grad_(False)
    tokens = (torch.arange(BATCH * LENGTH) % 97).reshape(BATCH, LENGTH)
    model(tokens, torch.arange(LENGTH).expand(BATCH, LENGTH), None).log_softmax(-1)[..., 7].square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [None if gradient is None else gradient.double().flatten().tolist() for gradient in gradients]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    mesh = start_mesh(LayoutConfig(), seed=0, timeout=timedelta(seconds=120))
    results = {
        folder.name: {name: kept_bytes(folder, mesh, recompute) for name, recompute in CASES.items()}
        for folder in arguments.models
    }
    results["frozen"] = {
        name: frozen_embedding(arguments.models[0], mesh, CASES[name]) for name in ("none", "uniform-1")
    }
    arguments.out.write_text(json.dumps(results))
    stop_mesh()


if __name__ == "__main__":
    main()
