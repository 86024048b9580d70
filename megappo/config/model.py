"""Section `model`: which model is trained, and in which precision."""

from typing import Literal

from pydantic import Field

from megappo.config.base import Section


class ModelConfig(Section):
    """The policy's architecture and starting weights."""

    path: str = Field(min_length=1, examples=["models/my-model"])
    """Hugging Face folder with `config.json` and safetensors files."""
    tokenizer_path: str | None = None
    """Folder of the tokenizer; `path` when null."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of parameters and activations. Log-probs and losses are float32 whatever is chosen."""
    layers: Literal["auto", "te", "torch"] = "auto"
    """Layer implementation: Transformer Engine where it imports (`auto`), or one of the two by name."""

    use_remove_padding: bool = False
    """Pack the sequences of a micro-batch into one row without padding."""
    experts: Literal["grouped", "sequential"] = "grouped"
    """Experts of a layer: two parameters for all local ones and grouped matrix products, or one module an expert."""

    @property
    def tokenizer_folder(self) -> str:
        return self.tokenizer_path or self.path
