"""One kind of layers against another on the same weights: log-probs, checkpoints and exports.

`--kinds te torch`: for each case under `--models`, rank 0 writes the mean differences of log-probs in bfloat16,
padded and packed, and how many tensors one kind saved and the other exported, all of the same bits. With
`--no-extra-state` checkpoints hold no extra state of layers, as those of layers that have none.
"""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

import argparse
import json
from datetime import timedelta
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from safetensors.torch import load_file
from torch import Tensor, nn

from megappo.config.layout import LayoutConfig
from megappo.models.architecture import ModelSpec
from megappo.models.build import build_model, read_model
from megappo.models.experts import EXTRA_STATE
from megappo.models.export_hf import export_hf
from megappo.models.import_hf import import_hf
from megappo.models.spec import Layers
from megappo.parallel.mesh import Mesh, start_mesh, stop_mesh
from megappo.trainer.checkpoint import LoopState, write_checkpoint
from megappo.trainer.policy_source import PolicySource
from megappo.trainer.saved_role import SavedRole
from tests.distributed.programs.log_probs import forward, packed_and_alone
from tests.support.model_cases import tokens


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--kinds", nargs=2, required=True)
    parser.add_argument("--no-extra-state", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    mesh = start_mesh(LayoutConfig(), seed=0, timeout=timedelta(minutes=2))
    if arguments.no_extra_state:
        GPTModel.sharded_state_dict = without_extra_state  # type: ignore[method-assign]
    folders = sorted(folder for folder in arguments.models.iterdir() if (folder / "config.json").exists())
    results = {folder.name: compare(folder, arguments.kinds, mesh, arguments.out.parent) for folder in folders}
    if mesh.is_writer:
        arguments.out.write_text(json.dumps(results))
    stop_mesh()


whole_state_dict = GPTModel.sharded_state_dict


def without_extra_state(model: GPTModel, *arguments: Any, **options: Any) -> dict[str, Any]:
    state = whole_state_dict(model, *arguments, **options)
    kept = {name: entry for name, entry in state.items() if not name.endswith(EXTRA_STATE)}
    assert len(kept) < len(state)
    return kept


def compare(folder: Path, kinds: list[Layers], mesh: Mesh, scratch: Path) -> dict[str, Any]:
    exact = log_probs(folder, "torch", mesh, torch.float32)
    rounded = {kind: log_probs(folder, kind, mesh, torch.bfloat16) for kind in kinds}
    first, second = rounded.values()
    return {
        "between": float((first - second).abs().mean()),
        "to float32": {kind: float((numbers - exact).abs().mean()) for kind, numbers in rounded.items()},
        "packed": {kind: packed_difference(folder, kind, mesh) for kind in kinds},
        "saved and exported": [
            moved(folder, writer, reader, mesh, scratch / f"{folder.name}-{number}")
            for number, (writer, reader) in enumerate(permutations(kinds))
        ],
    }


def log_probs(folder: Path, kind: Layers, mesh: Mesh, dtype: torch.dtype) -> Tensor:
    """[3, 23] float32 of `tokens()`."""
    spec, model = imported(folder, kind, mesh, dtype)
    logits = forward(model, mesh)
    assert logits is not None
    labels = tokens()[:, 1:, None].to(logits.device)
    return logits[:, :-1, : spec.shape.vocab_size].float().log_softmax(-1).gather(-1, labels)[..., 0].cpu()


def packed_difference(folder: Path, kind: Layers, mesh: Mesh) -> float:
    """Mean difference of log-probs in bfloat16 between packed sequences and the same ones alone."""
    spec, model = imported(folder, kind, mesh, torch.bfloat16)
    packed, alone = (
        logits[..., : spec.shape.vocab_size].float().log_softmax(-1) for logits in packed_and_alone(model, mesh)
    )
    return float((packed - alone).abs().mean())


def imported(folder: Path, kind: Layers, mesh: Mesh, dtype: torch.dtype) -> tuple[ModelSpec, nn.Module]:
    spec = read_model(folder)
    model = build_model(spec, mesh, dtype=dtype, layers=kind, head="lm").eval()
    import_hf(model, spec, mesh)
    return spec, model


def moved(folder: Path, writer: Layers, reader: Layers, mesh: Mesh, scratch: Path) -> int:
    """Saved by one kind and loaded by the other: the number of tensors that both export, all of the same bits."""
    spec = read_model(folder)
    model = build_model(spec, mesh, dtype=torch.bfloat16, layers=writer, head="lm")
    import_hf(model, spec, mesh)
    export_hf(model, spec, mesh, scratch / "exported")
    state = LoopState(step=0, data={}, kl_controller=None, seed=0)
    write_checkpoint(scratch / "checkpoint", {"actor": SavedRole(model, optimizer=None)}, state, mesh, spec, folder)
    loaded, _ = PolicySource.of(scratch / "checkpoint").load_any(mesh, layers=reader)
    export_hf(loaded, spec, mesh, scratch / "again")
    ours, theirs = (
        {path.name: load_file(path) for path in sorted((scratch / name).glob("*.safetensors"))}
        for name in ("exported", "again")
    )
    assert ours.keys() == theirs.keys()
    count = 0
    for name, tensors in ours.items():
        assert tensors.keys() == theirs[name].keys()
        for key, tensor in tensors.items():
            assert torch.equal(tensor.view(torch.uint8), theirs[name][key].view(torch.uint8)), key
            count += 1
    return count


if __name__ == "__main__":
    main()
