"""Losses of preference pairs: DPO and IPO on a policy's log-probs, Bradley-Terry on a reward model's scores."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True)
class PairLoss:
    """What a loss gives for each pair, all [pairs] float32; only `per_pair` has a graph.

    `chosen` and `rejected` are what the pair's responses are worth (implicit rewards, or scores).
    """

    per_pair: Tensor
    chosen: Tensor
    rejected: Tensor

    @property
    def margin(self) -> Tensor:
        return self.chosen - self.rejected

    @property
    def accuracy(self) -> Tensor:
        """1 where the chosen response is worth more, ½ where both are worth the same (a model that knows nothing)."""
        return (torch.sign(self.margin) + 1) / 2


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float,
    loss_type: str,
    label_smoothing: float = 0.0,
) -> PairLoss:
    """Direct preference optimisation on sequence log-probs [pairs], in nats, each summed over the response's tokens.

    With `h = (log π − log π_ref)(chosen) − (log π − log π_ref)(rejected)`:

    - `sigmoid` (arXiv 2305.18290, eq. 7): `−(1 − s) · log σ(β h) − s · log σ(−β h)`, s = `label_smoothing`, the
      share of pairs whose labels are taken to be wrong (conservative DPO).
    - `ipo` (arXiv 2310.12036, eq. 17): `(h − 1 / (2 β))²`, on sums as in the paper (TRL takes means over tokens).

    The implicit reward of a response is `β · (log π − log π_ref)`. Gradients flow into `chosen` and `rejected`.
    """
    ratio_chosen = chosen.float() - ref_chosen.detach().float()
    ratio_rejected = rejected.float() - ref_rejected.detach().float()
    difference = ratio_chosen - ratio_rejected
    if loss_type == "ipo":
        per_pair = (difference - 1 / (2 * beta)).square()
    else:
        assert loss_type == "sigmoid", f"{loss_type!r} is no DPO loss: sigmoid, ipo"
        right, wrong = logsigmoid(beta * difference), logsigmoid(-beta * difference)
        per_pair = -(1 - label_smoothing) * right - label_smoothing * wrong
    return PairLoss(per_pair, beta * ratio_chosen.detach(), beta * ratio_rejected.detach())


def bradley_terry_loss(chosen: Tensor, rejected: Tensor) -> PairLoss:
    """`−log σ(r_chosen − r_rejected)` of scores [pairs] (Bradley and Terry 1952; arXiv 2203.02155, eq. 1)."""
    chosen, rejected = chosen.float(), rejected.float()
    return PairLoss(-logsigmoid(chosen - rejected), chosen.detach(), rejected.detach())
