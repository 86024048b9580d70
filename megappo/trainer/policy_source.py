"""A policy on disk, for commands that only read one: a Hugging Face folder, or the actor of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel

from megappo.config.checkpoint_folder import MANIFEST, read_state
from megappo.errors import DataError
from megappo.models.build import ModelSpec, build_model, read_model
from megappo.models.import_hf import import_hf
from megappo.parallel.mesh import Mesh
from megappo.trainer.checkpoint import MODEL_FILES, SavedRole, check_files, load_role
from megappo.trainer.roles import DTYPES


@dataclass(frozen=True)
class PolicySource:
    """Where a policy's weights are.

    `folder` holds its configuration and tokenizer, `checkpoint` is None for HF weights.
    """

    folder: Path
    checkpoint: Path | None
    dtype: torch.dtype

    @classmethod
    def of(cls, path: str | Path) -> PolicySource:
        """Raises DataError where `path` is neither a Hugging Face folder nor a complete checkpoint."""
        path = Path(path)
        if (path / MANIFEST).exists():
            return cls(path / MODEL_FILES, path.resolve(), DTYPES[read_state(path)["dtype"]])
        if not (path / "config.json").exists():
            raise DataError(
                f"{path}: neither a Hugging Face folder (no config.json) nor a complete checkpoint (no {MANIFEST}); "
                "a checkpoint is a folder like runs/NAME/checkpoints/step-000010"
            )
        config = read_model(path).hf_config
        # Other types than these two (float16) are computed in float32, which holds all of their values.
        return cls(path, None, DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), torch.float32))

    def load(self, mesh: Mesh, dtype: torch.dtype | None = None) -> tuple[GPTModel, ModelSpec]:
        """The policy's shard on this rank, in `dtype` (the source's own when None). A collective call."""
        spec = read_model(self.folder)
        model = build_model(spec, mesh, dtype=dtype or self.dtype, layers="auto", head="lm")
        if self.checkpoint is None:
            import_hf(model, spec, mesh)
        else:
            check_files(self.checkpoint, mesh)
            load_role(self.checkpoint / "actor", SavedRole(model, optimizer=None))
        return model.requires_grad_(False), spec
