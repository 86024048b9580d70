"""A model on disk that is only read: a Hugging Face folder, or a role of a checkpoint; a policy or a reward model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from megappo.config.checkpoint_folder import MODEL_FILES, read_state
from megappo.config.checkpoint_names import MANIFEST, readable
from megappo.config.lora import LoraConfig
from megappo.errors import DataError
from megappo.models.attach_lora import attach_lora
from megappo.models.build import ModelSpec, build_model, read_model
from megappo.models.chunks import StageModel
from megappo.models.families.decoder import SCORE
from megappo.models.import_hf import import_hf, is_classifier
from megappo.models.spec import ContextExchange, Experts, Layers
from megappo.models.weight_map import Head
from megappo.parallel.mesh import Mesh
from megappo.trainer.checkpoint import check_files
from megappo.trainer.frozen_weights import FrozenWeights
from megappo.trainer.roles import DTYPES
from megappo.trainer.saved_role import SavedRole, load_role


@dataclass(frozen=True)
class PolicySource:
    """Where a policy's weights are.

    `folder` holds its configuration and tokenizer, `checkpoint` is None for HF weights. `base` holds the weights under
    the adapters of a checkpoint, where they are not (None) in the folder that its run had them in.
    """

    folder: Path
    checkpoint: Path | None
    dtype: torch.dtype
    base: Path | None = None

    @classmethod
    def of(cls, path: str | Path, base: str | Path | None = None) -> PolicySource:
        """Raises DataError where `path` is neither a Hugging Face folder nor a complete checkpoint, and where `base` is
        given for what holds all of its weights."""
        path = readable(path)
        if (path / MANIFEST).exists():
            dtype = DTYPES[read_state(path)["dtype"]]
            source = cls(path / MODEL_FILES, path.resolve(), dtype, Path(base) if base is not None else None)
            if base is not None and source.frozen is None:
                raise DataError(f"{path}: holds all weights of its model; leave out {base}, the folder of a base model")
            return source
        if base is not None:
            raise DataError(f"{path}: no checkpoint of adapters; leave out {base}, the folder of a base model")
        if not (path / "config.json").exists():
            raise DataError(
                f"{path}: neither a Hugging Face folder (no config.json) nor a complete checkpoint (no {MANIFEST}); "
                "a checkpoint is a folder like runs/NAME/checkpoints/step-000010"
            )
        config = read_model(path).hf_config
        # Other types than these two (float16) are computed in float32, which holds all of their values.
        return cls(path, None, DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), torch.float32))

    @property
    def head(self) -> Head:
        """What stands on the decoder: a checkpoint without an actor is a reward model's, a folder with a classifier's
        head a reward model."""
        if self.checkpoint is None:
            return "value" if is_classifier(self.folder) else "lm"
        return "lm" if (self.checkpoint / "actor").is_dir() else "value"

    @property
    def role(self) -> str:
        """The part of the checkpoint that is read, or that a folder becomes."""
        return "actor" if self.head == "lm" else "reward_model"

    @property
    def frozen(self) -> FrozenWeights | None:
        """Of a checkpoint which holds adapters without the weights under them."""
        if self.checkpoint is None:
            return None
        recorded = read_state(self.checkpoint).get("frozen", {}).get(self.role)
        return FrozenWeights.from_json(recorded) if recorded is not None else None

    def load(self, mesh: Mesh, dtype: torch.dtype | None = None) -> tuple[StageModel, ModelSpec]:
        """The policy's shard on this rank, in `dtype` (the source's own when None). A collective call.

        Raises DataError for a reward model.
        """
        if self.head != "lm":
            kind = f"a sequence classifier (it has {SCORE})"
            if self.checkpoint is not None:
                kind = "a reward model's checkpoint (it holds no actor)"
            raise DataError(
                f"{self.checkpoint or self.folder}: {kind}, and a policy is needed here; score with it: a part of kind "
                "model in reward.parts"
            )
        return self.load_any(mesh, dtype)

    def load_any(
        self,
        mesh: Mesh,
        dtype: torch.dtype | None = None,
        *,
        head: Head | None = None,
        layers: Layers = "auto",
        experts: Experts = "grouped",
        cp_comm_type: ContextExchange = "all_gather",
        is_packed: bool = False,
        adapters_alone: bool = False,
    ) -> tuple[StageModel, ModelSpec]:
        """Like `load`, with the head that the source has, or `head`. `adapters_alone`: the weights under adapters are
        not needed, and may stay undefined."""
        head = head or self.head
        spec = read_model(self.folder)
        lora = read_state(self.checkpoint).get("lora", {}).get(self.role) if self.checkpoint is not None else None
        layers = layers if lora is None else "torch"
        model = build_model(
            spec, mesh, dtype=dtype or self.dtype, layers=layers, head=head, experts=experts, cp_comm_type=cp_comm_type,
            is_packed=is_packed,
        )  # fmt: skip
        if self.checkpoint is None:
            import_hf(model, spec, mesh)
            return model.requires_grad_(False), spec
        check_files(self.checkpoint, mesh)
        frozen = self.frozen
        if frozen is not None and not adapters_alone:
            import_hf(model, read_model(self._folder_of(frozen)), mesh)
        if lora is not None:
            attach_lora(model, spec, mesh, LoraConfig.model_validate(lora), head, seed=0)
        load_role(self.checkpoint / self.role, SavedRole(model, optimizer=None), without_frozen=frozen is not None)
        return model.requires_grad_(False), spec

    def _folder_of(self, frozen: FrozenWeights) -> Path:
        """Where the weights under the adapters are; raises DataError where they are gone, or others."""
        folder = readable(self.base or frozen.folder)
        remedy = "name their folder with --base of megappo generate or megappo convert --merged"
        if not (folder / "config.json").exists():
            raise DataError(
                f"{self.checkpoint}: holds adapters, and there is no model any more in {folder}, whose weights they "
                f"belong to; {remedy}"
            )
        frozen.check(FrozenWeights.of(folder), str(self.checkpoint), remedy)
        return folder
