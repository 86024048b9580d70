"""What some families compute that GPTModel has no setting for: soft caps, windows, scaled embeddings, norms on the way
to the residual stream, and two RoPE tables in one model.

Seen with megatron-core 0.16.1, whose layers add to the residual stream through `self_attn_bda` and `mlp_bda`, called as
`bda(training, fused)((output, bias), residual, dropout)`, and give attention its RoPE table as `rotary_pos_emb`.
"""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn
from torch.nn import functional

from megappo.models.families.base import Activation, ModelShape
from megappo.models.scores import softcapped
from megappo.models.weight_map import Head


def gelu_tanh(gate: Tensor) -> Tensor:
    """GELU by its approximation with tanh, `gelu_pytorch_tanh` of Hugging Face."""
    return functional.gelu(gate, approximate="tanh")


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {"silu": functional.silu, "gelu_tanh": gelu_tanh}


def add_variants(model: GPTModel, shape: ModelShape, norm: Callable[..., nn.Module], head: Head) -> None:
    """Gives a stage, before its weights are filled, what `shape` asks for beyond Megatron's settings.

    `norm(config=…, hidden_size=…, eps=…)` makes a norm of the kind that the stage's other norms are of.
    """
    if shape.local_rope_theta is not None:
        model.rotary_pos_emb = RotaryPair(model.rotary_pos_emb, shape, model.config.use_cpu_initialization)
    for layer in model.decoder.layers:
        attention: Any = layer.self_attention
        is_local = layer.layer_number - 1 in shape.local_layers
        if shape.needs_torch_layers:
            attention.core_attention.window = shape.window if is_local else None
            attention.core_attention.softcap = shape.attention_softcap
        if shape.local_rope_theta is not None:
            attention.register_forward_pre_hook(partial(_choose_table, is_local), with_kwargs=True)
        if shape.residual_norms:
            for name in ("self_attn_bda", "mlp_bda"):
                own = norm(config=model.config, hidden_size=shape.hidden_size, eps=shape.norm_eps)
                setattr(layer, name, NormedResidual(own))
    if shape.embedding_scale is not None and model.pre_process:
        scale = torch.tensor(shape.embedding_scale, dtype=model.config.params_dtype).item()
        model.embedding.register_forward_hook(partial(_scale, scale))
    if shape.logit_softcap is not None and head == "lm" and model.post_process:
        model.output_layer.logit_softcap = shape.logit_softcap
        model.output_layer.register_forward_hook(_cap_logits)


def logit_softcap(model: GPTModel) -> float | None:
    """The soft cap that the model's output layer was given, for whoever computes logits without calling it."""
    return getattr(model.output_layer, "logit_softcap", None)


class NormedResidual(nn.Module):
    """In the place of a layer's `…_bda`: what a part adds to the residual stream goes through a norm first."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        return self._add

    def _add(self, output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        """[s, b, hidden] of both."""
        output, bias = output_with_bias
        assert bias is None and dropout == 0, "layers with residual norms have neither biases nor dropout"
        return residual + self.norm(output)


class RotaryPair(nn.Module):
    """Two RoPE tables side by side, [s, 1, 1, 2 · rotary dim]: that of other layers, then that of local ones."""

    def __init__(self, rotary: RotaryEmbedding, shape: ModelShape, use_cpu_initialization: bool) -> None:
        super().__init__()
        self.rotary = rotary
        self.local = RotaryEmbedding(
            kv_channels=shape.head_dim,
            rotary_percent=shape.rotary_percent,
            rotary_interleaved=shape.rotary_interleaved,
            rotary_base=shape.local_rope_theta,
            use_cpu_initialization=use_cpu_initialization,
            cp_group=rotary.cp_group,
        )

    def get_rotary_seq_len(self, *arguments: Any, **settings: Any) -> int:
        """Asked by GPTModel, which hands the answer to `forward`."""
        return self.rotary.get_rotary_seq_len(*arguments, **settings)  # type: ignore[no-any-return]

    def get_emb(self, length: int, offset: int = 0) -> Tensor:
        """Both tables for the whole sequence."""
        return torch.cat([self.rotary.get_emb(length, offset), self.local.get_emb(length, offset)], dim=-1)

    def forward(self, *arguments: Any, **settings: Any) -> Tensor:
        return torch.cat([self.rotary(*arguments, **settings), self.local(*arguments, **settings)], dim=-1)


def _choose_table(is_local: bool, _: nn.Module, arguments: Any, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Before a layer's attention: its own half of the two tables."""
    both: Tensor = settings["rotary_pos_emb"]
    return arguments, settings | {"rotary_pos_emb": both.chunk(2, dim=-1)[int(is_local)]}


def _scale(scale: float, _: nn.Module, __: Any, embedded: Tensor) -> Tensor:
    return embedded * scale


def _cap_logits(layer: nn.Module, _: Any, output: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    logits, bias = output
    return softcapped(logits, layer.logit_softcap), bias  # type: ignore[arg-type]
