"""Weights against the mismatch between the engine that sampled and the trainer that learns; [B, T], 0 where masked.

With d = old − rollout log-prob of a token, w = exp(d) is how much likelier the trainer finds it.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megappo.algorithms.losses import LOG_RATIO_LIMIT
from megappo.algorithms.masked import keep

CorrectionKind = Literal["token", "sequence", "icepop"]


@dataclass(frozen=True)
class CorrectionLimits:
    """Where `token` and `sequence` cut the weight off, and the range that `icepop` keeps."""

    threshold: float = 2.0
    icepop_low: float = 0.5
    icepop_high: float = 5.0


@torch.no_grad()
def correction_weights(
    kind: CorrectionKind, old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, limits: CorrectionLimits
) -> Tensor:
    """Constant factors of the policy loss, [B, T] float32.

    Truncated importance sampling `min(w, threshold)` with w of each token, or of the whole sequence (from the sum of
    its d, on each of its tokens); `icepop` (arXiv 2510.18855) is 1 where low ≤ w ≤ high and 0 elsewhere.

    d, or its sum, is held to ±20 before the exponential.
    """
    d = keep(mask, old_log_probs.float()) - keep(mask, rollout_log_probs.float())
    if kind == "sequence":
        d = d.double().sum(dim=-1, keepdim=True).float().expand(mask.shape)
    w = torch.exp(torch.clamp(d, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    if kind == "icepop":
        return keep(mask, ((w >= limits.icepop_low) & (w <= limits.icepop_high)).float())
    return keep(mask, w.clamp(max=limits.threshold))
