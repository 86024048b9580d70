"""From logits to tokens and their log-probabilities. Where the logits and the noise come from is not here."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.engines.rollout import SamplingParams

# Elements of a [rows, vocabulary] block that is sampled at once: bounds the float64 copies (128 MiB each).
BLOCK_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Draw:
    """One token for each row: `token_ids` [rows] int64, and `log_probs` [rows] float32, in nats, under the distribution
    that the token was drawn from."""

    token_ids: Tensor
    log_probs: Tensor


def draw(logits: Tensor, noise: Tensor, sampling: SamplingParams) -> Draw:
    """Draws one token a row from `logits` [rows, vocabulary], with `noise` [rows] in [0, 1).

    Temperature divides the logits, then top-k, then top-p restrict and renormalise the distribution (vLLM's order).
    Temperature 0 takes the most probable token, the lowest id among equals, with its log-probability at temperature 1.
    """
    assert noise.shape == logits.shape[:1], f"{tuple(noise.shape)} noise for {tuple(logits.shape)} logits"
    rows = max(1, BLOCK_ELEMENTS // logits.shape[1])
    choose = _greedy if sampling.temperature == 0 else _sampled
    draws = [
        choose(block.float(), part, sampling)
        for block, part in zip(logits.split(rows), noise.to(logits.device).split(rows), strict=True)
    ]
    return Draw(torch.cat([part.token_ids for part in draws]), torch.cat([part.log_probs for part in draws]))


def _greedy(logits: Tensor, noise: Tensor, sampling: SamplingParams) -> Draw:
    ids = torch.arange(logits.shape[1], device=logits.device)
    # torch.argmax promises nothing about ties; two layouts must not differ by one.
    is_best = logits == logits.amax(dim=1, keepdim=True)
    token_ids = torch.where(is_best, ids, logits.shape[1] - 1).amin(dim=1)
    return Draw(token_ids, _log_probs_of(token_ids, logits))


def _sampled(logits: Tensor, noise: Tensor, sampling: SamplingParams) -> Draw:
    logits = restricted(logits / sampling.temperature, sampling.top_k, sampling.top_p)
    # The inverse of the cumulative distribution, in the order of token ids. float64: at 150,000 tokens the float32
    # running sum is off by more than a rare token's probability.
    cumulative = logits.softmax(dim=1).double().cumsum(dim=1)
    threshold = noise[:, None] * cumulative[:, -1:]
    token_ids = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    # Only NaN logits get past the end; their log-probability is NaN too, which the engine reports.
    token_ids = token_ids.clamp(max=logits.shape[1] - 1)
    return Draw(token_ids, _log_probs_of(token_ids, logits))


def restricted(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """`logits` [rows, vocabulary] with −inf where top-k, and then top-p, leave a token out; 0 and 1 are off.

    top-k keeps ties with the k-th. top-p keeps the fewest tokens, most probable first, whose probabilities reach p:
    those before which less than p is reached, so at least one.
    """
    if 0 < top_k < logits.shape[1]:
        smallest_kept = logits.topk(top_k, dim=1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest_kept, -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(dim=1, descending=True, stable=True)
        probabilities = ordered.softmax(dim=1).double()
        is_left_out = probabilities.cumsum(dim=1) - probabilities >= top_p
        is_left_out[:, 0] = False
        logits = logits.masked_fill(torch.empty_like(is_left_out).scatter_(1, order, is_left_out), -torch.inf)
    return logits


def _log_probs_of(token_ids: Tensor, logits: Tensor) -> Tensor:
    return logits.log_softmax(dim=1).gather(1, token_ids[:, None])[:, 0]
