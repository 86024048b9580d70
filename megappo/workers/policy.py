"""What actor and reference share: log-probs of a model's own tokens from vocab-parallel logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.algorithms.aggregate import Denominators
from megappo.experience.batch import ExperienceBatch
from megappo.experience.micro import MicroBatch
from megappo.parallel.collectives import sum_over
from megappo.parallel.mesh import Mesh
from megappo.parallel.vocab import vocab_parallel_kl, vocab_parallel_log_probs


@dataclass(frozen=True)
class LogProbs:
    """Reads log-probs and entropies of response tokens off logits that are sharded over the TP ranks.

    Called with logits [b, s / cp, vocab / tp]; the results are float32 [b, s], 0 where the response mask is false.
    """

    mesh: Mesh
    vocab_size: int
    temperature: float
    chunk_tokens: int

    def __call__(self, logits: Tensor, micro: MicroBatch) -> Tensor:
        log_probs, _ = self.with_entropy(logits, micro, entropy=False)
        return log_probs

    def with_entropy(self, logits: Tensor, micro: MicroBatch, *, entropy: bool = True) -> tuple[Tensor, Tensor]:
        """(log_probs, entropy). The logits before a token give both, so row t - 1 is read for token t."""
        mask = _read(micro)
        log_probs, entropies = vocab_parallel_log_probs(
            logits.flatten(0, 1),
            micro.local(_next(micro.token_ids))[mask],
            vocab_size=self.vocab_size,
            temperature=self.temperature,
            tp_group=self.mesh.tp_group,
            chunk_tokens=self.chunk_tokens,
            with_entropy=entropy,
            rows=mask.flatten().nonzero()[:, 0],
        )
        return _at_tokens(log_probs, mask, micro), _at_tokens(entropies, mask, micro)

    def exact_kl(self, logits: Tensor, ref_logits: Tensor, micro: MicroBatch) -> Tensor:
        """KL(policy ‖ reference) over the whole vocabulary at each response token, with a gradient to `logits`; both
        [b, s / cp, vocab / tp]."""
        mask = _read(micro)
        kl = vocab_parallel_kl(
            logits.flatten(0, 1),
            ref_logits.flatten(0, 1),
            vocab_size=self.vocab_size,
            temperature=self.temperature,
            tp_group=self.mesh.tp_group,
            chunk_tokens=self.chunk_tokens,
            rows=mask.flatten().nonzero()[:, 0],
        )
        return _at_tokens(kl, mask, micro)


def values_at_tokens(output: Tensor, micro: MicroBatch) -> Tensor:
    """[b, s / cp, 1] output of a value head → [b, s] values, each at the token that the state before it produces."""
    mask = _read(micro)
    return _at_tokens(output[..., 0][mask].float(), mask, micro)


def global_denominators(minibatch: ExperienceBatch, mesh: Mesh) -> Denominators:
    """Response tokens and sequences of a minibatch, of which every data-parallel rank gives its part."""
    mask = minibatch.padded(minibatch.response_mask)
    return Denominators.of(mask).reduced(sum_over(mesh.dp_group, mesh.device))


def _next(view: Tensor) -> Tensor:
    """[b, s] → [b, s]: at each place what stands after it, which may be on another context-parallel rank; last 0."""
    return torch.nn.functional.pad(view[:, 1:], (0, 1))


def _read(micro: MicroBatch) -> Tensor:
    """[b, s / cp] bool: the rows of this rank's output that are read, those before a predicted token."""
    return micro.local(_next(micro.predicted))


def _at_tokens(selected: Tensor, mask: Tensor, micro: MicroBatch) -> Tensor:
    """Puts the [n] values of the true places of mask [b, s / cp] at the tokens after them in [b, s]; 0 elsewhere."""
    view = selected.new_zeros(mask.shape)
    view = micro.whole(view.masked_scatter(mask, selected))
    return torch.nn.functional.pad(view[:, :-1], (1, 0))
