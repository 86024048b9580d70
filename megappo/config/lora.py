"""Section `lora` of the actor's model and of the critic: low-rank adapters in the place of full training."""

from typing import Any, Literal

from pydantic import Field

from megappo.config.base import Section

ALL_LINEAR = "all-linear"
"""Every projection of attention and feed-forward part, experts included."""


class LoraConfig(Section):
    """Low-rank adapters: the weights stay as they are, and ΔW = alpha / rank · B · A is trained beside them."""

    rank: int = Field(0, ge=0)
    """Rows of A and columns of B; 0 trains all weights."""
    alpha: float = Field(16.0, gt=0)
    """ΔW is multiplied by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of an adapter's inputs that an update leaves out; the log-prob passes and generation leave out none."""
    target_modules: tuple[str, ...] = Field((ALL_LINEAR,), min_length=1)
    """What is adapted, the same in every layer: names of Hugging Face modules (`q_proj`), patterns of names or of whole
    paths (`*_proj`, `*.self_attn.*`, `*.experts.*`), or `all-linear`."""
    type: Literal["lora", "dora"] = "lora"
    """`dora` trains the length of each row of W + ΔW too, apart from its direction."""
    adapter_path: str | None = None
    """Folder in PEFT's format whose adapters the run begins with; null draws A and begins with ΔW = 0."""
    export_merged: bool = False
    """`trainer.export_hf` writes the whole model with ΔW in it; otherwise the adapter alone, in PEFT's format."""

    @property
    def shape(self) -> dict[str, Any]:
        """What two runs must share to load each other's adapters."""
        return self.model_dump(mode="json", include={"rank", "alpha", "target_modules", "type"})

    @property
    def is_used(self) -> bool:
        return self.rank > 0
