"""The three kinds of modules that a GPTModel decodes with, and the context that puts them in and takes them out again.

Written for `GPTModel` of megatron-core 0.16.1 and 0.19.2, whose `forward` asks `rotary_pos_emb` for a table by length
and calls `output_layer(hidden, weight=…, runtime_gather_output=…)`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

from megappo.engines.native.attention import CachedAttention, CurrentStep
from megappo.engines.native.pieces import OutputPieces
from megappo.models.chunks import StageModel, chunks_of
from megappo.models.scores import softcapped
from megappo.models.variants import logit_softcap


class PositionRows(nn.Module):
    """RoPE angles of the step's tokens, [T, 1, 1, rotary dim], in the place of a table by position in the batch.

    With YaRN there is a number beside, which the turned parts of queries and keys are multiplied with.
    """

    def __init__(self, rotary: nn.Module, max_length: int, step: CurrentStep) -> None:
        super().__init__()
        table: Tensor | tuple[Tensor, float] = rotary.get_emb(max_length)  # type: ignore[operator]
        self._scale: float | None = None
        if isinstance(table, tuple):
            table, self._scale = table
        self._table = table
        self._step = step

    def get_rotary_seq_len(self, *_: object, **__: object) -> int:
        """Asked by GPTModel, or by latent attention, which hand the answer to `forward`."""
        return len(self._step.tokens.positions)

    def forward(self, length: int, **_: object) -> Tensor | tuple[Tensor, float]:
        rows = self._table[self._step.tokens.positions]
        return rows if self._scale is None else (rows, self._scale)


class LogitRows(nn.Module):
    """The output layer, for the rows that draw a token: hidden [T or T / tp, 1, H] → [rows, 1, vocabulary / tp]."""

    def __init__(self, output_layer: nn.Module, softcap: float | None, step: CurrentStep) -> None:
        super().__init__()
        self._output_layer = output_layer
        self._softcap = softcap
        self._step = step

    @property
    def weight(self) -> Tensor:
        """Read by GPTModel where the embedding is tied and lives on another pipeline stage."""
        return self._output_layer.weight  # type: ignore[return-value]

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **_: object) -> tuple[Tensor, None]:
        """Hidden [T or T / tp, 1, H] → logits [rows, 1, vocabulary / tp] and no bias."""
        if isinstance(self._output_layer, OutputPieces):
            return self._output_layer(hidden[self._step.tokens.logit_rows])  # type: ignore[no-any-return]
        if self._output_layer.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=self._output_layer.tp_group)
        rows = hidden[self._step.tokens.logit_rows]
        # The layer itself is not called, so that its hook, which caps logits (`variants.py`), does not run.
        logits = F.linear(rows, self.weight if weight is None else weight)
        return softcapped(logits, self._softcap), None


@contextmanager
def decoding(model: StageModel, max_length: int, step: CurrentStep) -> Iterator[None]:
    """While inside, `model` computes the steps that are entered in `step`, in evaluation mode and without gradients;
    afterwards, also after an error, it is as it was. `max_length` is the longest sequence, in tokens."""
    # no_grad and not inference_mode: tensors that Megatron caches on the way are used in training afterwards.
    swaps = _swaps(model, max_length, step)
    originals = [(parent, name, getattr(parent, name)) for parent, name, _ in swaps]
    in_training = [module for module in model.modules() if module.training]
    try:
        for parent, name, replacement in swaps:
            setattr(parent, name, replacement)
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for parent, name, original in originals:
            setattr(parent, name, original)
        for module in in_training:
            module.training = True


def _cached_attention(layer: nn.Module, number: int, step: CurrentStep) -> CachedAttention:
    attention: Any = layer.self_attention
    core = attention.core_attention
    # Transformer Engine's attention has neither; models that need them have megappo's.
    window, softcap = getattr(core, "window", None), getattr(core, "softcap", None)
    config = attention.config
    scale = attention.softmax_scale if config.multi_latent_attention else config.softmax_scale
    return CachedAttention(number, step, scale, window, softcap)


def _swaps(model: StageModel, max_length: int, step: CurrentStep) -> list[tuple[nn.Module, str, nn.Module]]:
    """(parent, attribute, module that takes its place)."""
    chunks = chunks_of(model)
    layers = [layer for chunk in chunks for layer in chunk.decoder.layers]
    swaps: list[tuple[nn.Module, str, nn.Module]] = [
        (layer.self_attention, "core_attention", _cached_attention(layer, number, step))
        for number, layer in enumerate(layers)
    ]
    # With latent attention, each layer has a table of its own instead of one in the model; all are alike.
    attentions = [layer.self_attention for layer in layers]
    owners = attentions if model.config.multi_latent_attention else chunks
    rows = PositionRows(owners[0].rotary_pos_emb, max_length, step)
    swaps += [(owner, "rotary_pos_emb", rows) for owner in owners]
    for chunk in chunks:
        if chunk.post_process:
            swaps.append((chunk, "output_layer", LogitRows(chunk.output_layer, logit_softcap(chunk), step)))
    return swaps
