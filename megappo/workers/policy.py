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

    Called with logits [b, s, vocab / tp]; the results are float32 [b, s], 0 where the response mask is false.
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
        mask = micro.predicted[:, 1:]
        log_probs, entropies = vocab_parallel_log_probs(
            logits.flatten(0, 1),
            micro.token_ids[:, 1:][mask],
            vocab_size=self.vocab_size,
            temperature=self.temperature,
            tp_group=self.mesh.tp_group,
            chunk_tokens=self.chunk_tokens,
            with_entropy=entropy,
            rows=_rows_before(mask),
        )
        return _at_tokens(log_probs, mask), _at_tokens(entropies, mask)

    def exact_kl(self, logits: Tensor, ref_logits: Tensor, micro: MicroBatch) -> Tensor:
        """KL(policy ‖ reference) over the whole vocabulary at each response token, with a gradient to `logits`; both
        [b, s, vocab / tp]."""
        mask = micro.predicted[:, 1:]
        kl = vocab_parallel_kl(
            logits.flatten(0, 1),
            ref_logits.flatten(0, 1),
            vocab_size=self.vocab_size,
            temperature=self.temperature,
            tp_group=self.mesh.tp_group,
            chunk_tokens=self.chunk_tokens,
            rows=_rows_before(mask),
        )
        return _at_tokens(kl, mask)


def values_at_tokens(output: Tensor, micro: MicroBatch) -> Tensor:
    """[b, s, 1] output of a value head → [b, s] values, each at the token that the state before it produces."""
    mask = micro.predicted[:, 1:]
    return _at_tokens(output[:, :-1, 0][mask].float(), mask)


def global_denominators(minibatch: ExperienceBatch, mesh: Mesh) -> Denominators:
    """Response tokens and sequences of a minibatch, of which every data-parallel rank gives its part."""
    mask = minibatch.padded(minibatch.response_mask)
    return Denominators.of(mask).reduced(sum_over(mesh.dp_group, mesh.device))


def _rows_before(mask: Tensor) -> Tensor:
    """Where the logits of the true places of mask [b, s - 1] stand among b · s flat rows: a token's before it."""
    return torch.nn.functional.pad(mask, (0, 1)).flatten().nonzero()[:, 0]


def _at_tokens(selected: Tensor, mask: Tensor) -> Tensor:
    """Puts the [n] values of the true places of mask [b, s - 1] at their tokens in [b, s]; 0 elsewhere."""
    view = selected.new_zeros(mask.shape)
    view = view.masked_scatter(mask, selected)
    return torch.nn.functional.pad(view, (1, 0))
