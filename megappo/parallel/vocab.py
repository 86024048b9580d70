"""Log-probabilities, entropy and exact KL over a vocabulary that is sharded over TP ranks, in chunks of tokens.

Autograd functions whose forward keeps a few numbers a token, and whose backward recomputes the softmax chunk by chunk.
The float32 copy of the logits exists for one chunk at a time, never for all tokens.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def vocab_parallel_log_probs(
    logits: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    temperature: float,
    tp_group: ProcessGroup | None,
    chunk_tokens: int,
    with_entropy: bool,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(log softmax(logits / temperature)[target], entropy of that softmax) in nats, each `[tokens]` float32.

    `logits` [rows, padded vocab / tp]: this rank's columns, of any float type. `targets` [tokens] int64: ids in the
    whole vocabulary, the same on all ranks of `tp_group` (None is one rank). `rows` [tokens] int64 is the row of each
    target's logits, no row twice; None is row by row. Rows that are not named are not read and get no gradient, without
    a copy of the others. Columns of ids ≥ `vocab_size` are padding: they get no probability and no gradient.
    `chunk_tokens` bounds the float32 copy. Without `with_entropy` the entropy is zeros. float64 logits give float64
    results. The gradient is in the logits' type.
    """
    rows = _all_rows(logits) if rows is None else rows
    assert logits.dim() == 2 and targets.shape == rows.shape, "logits are [rows, vocab / tp], one target a row"
    log_probs, entropy = _VocabParallelLogProbs.apply(
        logits, rows, targets, vocab_size, temperature, tp_group, chunk_tokens, with_entropy
    )
    return log_probs, entropy


class _VocabParallelLogProbs(torch.autograd.Function):
    """With z = logits / temperature, p = softmax(z), H = −Σ p log p, for gradients g of log p[target] and h of H:

    d/dz_v = g · (1[v = target] − p_v) − h · p_v · (log p_v + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        rows: Tensor,
        targets: Tensor,
        vocab_size: int,
        temperature: float,
        tp_group: ProcessGroup | None,
        chunk_tokens: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs [tokens] of `targets` and entropies, of the logits at `rows`."""
        columns = _Columns(logits, vocab_size, temperature, tp_group)
        tokens = rows.shape[0]
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        log_probs = torch.zeros(tokens, dtype=dtype, device=logits.device)
        entropy, log_normalizer = torch.zeros_like(log_probs), torch.zeros_like(log_probs)
        for start in range(0, tokens, chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            scaled = columns.scaled(logits[rows[chunk]], dtype)
            log_normalizer[chunk] = columns.log_normalizer(scaled)
            log_probs[chunk] = columns.at_targets(scaled, targets[chunk]) - log_normalizer[chunk]
            if with_entropy:
                # Padding has p = 0 and log p = −inf, whose product must be 0. (log Z − Σ p z would lose digits.)
                log_p = scaled.sub_(log_normalizer[chunk, None])
                probabilities = log_p.exp()
                expected = log_p.masked_fill_(columns.is_padding, 0.0).mul_(probabilities).sum(dim=1)
                entropy[chunk] = -columns.sum(expected)
        ctx.save_for_backward(logits, rows, targets, log_normalizer, entropy)
        ctx.columns, ctx.chunk_tokens, ctx.with_entropy = columns, chunk_tokens, with_entropy
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """The gradient of the logits, chunk by chunk in one buffer of their type."""
        logits, rows, targets, log_normalizer, entropy = ctx.saved_tensors
        columns: _Columns = ctx.columns
        grad_log_probs, grad_entropy = grads
        grad_logits = torch.zeros_like(logits)
        for start in range(0, rows.shape[0], ctx.chunk_tokens):
            chunk = slice(start, start + ctx.chunk_tokens)
            log_p = columns.scaled(logits[rows[chunk]], log_normalizer.dtype).sub_(log_normalizer[chunk, None])
            probabilities = log_p.exp()
            grad = probabilities * -grad_log_probs[chunk, None]
            columns.add_at_targets(grad, targets[chunk], grad_log_probs[chunk])
            if ctx.with_entropy:
                slope = log_p.masked_fill_(columns.is_padding, 0.0).add_(entropy[chunk, None])
                grad.sub_(slope.mul_(probabilities).mul_(grad_entropy[chunk, None]))
            grad_logits[rows[chunk]] = grad.div_(columns.temperature).to(grad_logits.dtype)
        return grad_logits, None, None, None, None, None, None, None


def vocab_parallel_kl(
    logits: Tensor,
    ref_logits: Tensor,
    *,
    vocab_size: int,
    temperature: float,
    tp_group: ProcessGroup | None,
    chunk_tokens: int,
    rows: Tensor | None = None,
) -> Tensor:
    """Σ_v π(v) (log π(v) − log π_ref(v)) of each token, in nats, `[tokens]` float32; the gradient is `logits`' alone.

    Both [rows, padded vocab / tp]: this rank's columns of the two models' logits for the same tokens. The rest as in
    `vocab_parallel_log_probs`.
    """
    assert logits.shape == ref_logits.shape, "policy and reference have the same columns of the same tokens"
    kl: Tensor = _VocabParallelKL.apply(
        logits, ref_logits.detach(), _all_rows(logits) if rows is None else rows, vocab_size, temperature, tp_group,
        chunk_tokens,
    )  # fmt: skip
    return kl


class _VocabParallelKL(torch.autograd.Function):
    """With z = logits / temperature and p = softmax(z): d KL / dz_v = p_v · (log p_v − log q_v − KL)."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        ref_logits: Tensor,
        rows: Tensor,
        vocab_size: int,
        temperature: float,
        tp_group: ProcessGroup | None,
        chunk_tokens: int,
    ) -> Tensor:
        """[tokens]: the KL of the logits at `rows` to the reference's."""
        columns = _Columns(logits, vocab_size, temperature, tp_group)
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        kl = torch.zeros(rows.shape[0], dtype=dtype, device=logits.device)
        normalizers = torch.zeros(2, rows.shape[0], dtype=dtype, device=logits.device)
        for start in range(0, rows.shape[0], chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            parts = logits[rows[chunk]], ref_logits[rows[chunk]]
            for model, part in enumerate(parts):
                normalizers[model, chunk] = columns.log_normalizer(columns.scaled(part, dtype))
            log_p, difference = columns.log_p_and_difference(*parts, normalizers[:, chunk])
            kl[chunk] = columns.sum(difference.mul_(log_p.exp_()).sum(dim=1))
        ctx.save_for_backward(logits, ref_logits, rows, normalizers, kl)
        ctx.columns, ctx.chunk_tokens = columns, chunk_tokens
        return kl

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """The gradient of the logits, chunk by chunk in one buffer of their type."""
        logits, ref_logits, rows, normalizers, kl = ctx.saved_tensors
        columns: _Columns = ctx.columns
        (grad_kl,) = grads
        grad_logits = torch.zeros_like(logits)
        for start in range(0, rows.shape[0], ctx.chunk_tokens):
            chunk = slice(start, start + ctx.chunk_tokens)
            parts = logits[rows[chunk]], ref_logits[rows[chunk]]
            log_p, slope = columns.log_p_and_difference(*parts, normalizers[:, chunk])
            slope.sub_(kl[chunk, None]).mul_(log_p.exp_()).mul_(grad_kl[chunk, None])
            grad_logits[rows[chunk]] = slope.div_(columns.temperature).to(grad_logits.dtype)
        return grad_logits, None, None, None, None, None, None


def _all_rows(logits: Tensor) -> Tensor:
    return torch.arange(logits.shape[0], device=logits.device)


class _Columns:
    """This rank's columns of the vocabulary, and the reductions over all ranks' columns."""

    def __init__(self, logits: Tensor, vocab_size: int, temperature: float, group: ProcessGroup | None) -> None:
        size = logits.shape[1]
        self.group = group if group is not None and group.size() > 1 else None
        self.first = size * self.group.rank() if self.group is not None else 0
        self.size = size
        self.temperature = temperature
        self.is_padding = (
            torch.arange(self.first, self.first + size, device=logits.device) >= vocab_size
        )  # [vocab / tp]

    def scaled(self, logits: Tensor, dtype: torch.dtype) -> Tensor:
        """logits / temperature as a copy in `dtype`, padding −inf."""
        return logits.to(dtype, copy=True).div_(self.temperature).masked_fill_(self.is_padding, -torch.inf)

    def log_normalizer(self, scaled: Tensor) -> Tensor:
        """[tokens]: log Σ_v exp(z_v) over all ranks."""
        highest = scaled.amax(dim=1)
        if self.group is not None:
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=self.group)
        return self.sum((scaled - highest[:, None]).exp_().sum(dim=1)).log() + highest

    def log_p_and_difference(self, logits: Tensor, ref_logits: Tensor, normalizers: Tensor) -> tuple[Tensor, Tensor]:
        """(log p, log p − log q) [tokens, columns] of two models, −inf and 0 in the padding; `normalizers`
        [2, tokens] are their log Z."""
        log_p = self.scaled(logits, normalizers.dtype).sub_(normalizers[0][:, None])
        log_q = self.scaled(ref_logits, normalizers.dtype).sub_(normalizers[1][:, None])
        return log_p, torch.sub(log_p, log_q, out=log_q).masked_fill_(self.is_padding, 0.0)

    def sum(self, values: Tensor) -> Tensor:
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
        return values

    def at_targets(self, scaled: Tensor, targets: Tensor) -> Tensor:
        """[tokens]: z[target], from the rank that has the column."""
        is_mine, column = self._mine(targets)
        return self.sum(scaled.gather(1, column[:, None])[:, 0].masked_fill(~is_mine, 0.0))

    def add_at_targets(self, values: Tensor, targets: Tensor, addend: Tensor) -> None:
        is_mine, column = self._mine(targets)
        values.scatter_add_(1, column[:, None], addend.masked_fill(~is_mine, 0.0)[:, None])

    def _mine(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        column = targets - self.first
        is_mine = (column >= 0) & (column < self.size)
        return is_mine, column.masked_fill(~is_mine, 0)
