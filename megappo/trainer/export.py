"""The model that a run leaves: `hf/step-NNNNNN`, and the link `hf/latest` to it."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from megappo.config.checkpoint_names import LATEST, remove_left_over
from megappo.models.attach_lora import attached_lora
from megappo.models.build import ModelSpec
from megappo.models.chunks import StageModel
from megappo.models.export_adapter import export_adapter
from megappo.models.export_hf import export_hf
from megappo.parallel.mesh import Mesh
from megappo.trainer.checkpoint import point_to


def export_model(
    folder: Path, step: int, model: StageModel, spec: ModelSpec, mesh: Mesh, tokenizer_folder: Path
) -> None:
    """Writes the model after `step`, or its adapters alone, with the run's tokenizer. A collective call.

    An export of this step, of an earlier run or of this one before it was resumed, is removed once the new one is
    there: whenever the process ends, one of the two is complete.
    """
    target = folder / f"step-{step:06d}"
    if mesh.is_writer:
        remove_left_over(folder)
    lora = attached_lora(model)
    export = export_hf if lora is None or lora.export_merged else export_adapter
    export(model, spec, mesh, target, tokenizer_folder=tokenizer_folder, replaces=True)
    if mesh.is_writer:
        point_to(folder / LATEST, target)
    if mesh.world_size > 1:
        dist.barrier()
