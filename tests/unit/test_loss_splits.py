"""One minibatch, cut into micro-batches and over data-parallel ranks in every way: the same loss and gradient.

Ranks are simulated: each has its part of the sequences and the denominators of all. The real ones are in
tests/distributed.
"""

import itertools
from types import SimpleNamespace
from typing import Literal, cast

import pytest
import torch
from torch import Tensor

from megappo.algorithms.aggregate import Denominators
from megappo.config.actor import ActorConfig
from megappo.experience.batch import ExperienceBatch
from megappo.experience.micro import MicroBatch, micro_batches
from megappo.parallel.mesh import Mesh
from megappo.workers.actor import ActorLoss, TokenKL, estimated_kl
from megappo.workers.policy import LogProbs

VOCABULARY, COLUMNS = 11, 12  # the last column is padding
PROMPT = 2
RESPONSES = [3, 1, 0, 5, 2, 4, 1, 6]  # ragged, one empty
LOSSES = ("vanilla", "gspo", "cispo")
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KL_TYPES = ("low_var_kl", "k3+", "full")
CUTS = list(itertools.product((1, 2, 4), (1, 2, 4)))  # (micro-batches of a rank, ranks)
LIMIT = 1e-6


def experience() -> ExperienceBatch:
    """Eight sequences with NaN wherever no response token is, and a gap in the longest."""
    generator = torch.Generator().manual_seed(0)
    lengths = [PROMPT + length for length in RESPONSES]
    tokens = [torch.randint(0, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    batch = ExperienceBatch.from_sequences(tokens, [PROMPT] * len(lengths), range(len(lengths)))
    batch.response_mask[-3] = False

    def draw(scale: float, centre: float) -> Tensor:
        values = centre + scale * torch.randn(batch.num_tokens, generator=generator)
        return torch.where(batch.response_mask, values, torch.nan)

    return batch.fill(
        old_log_probs=draw(0.7, -2.4), ref_log_probs=draw(0.7, -2.4), advantages=draw(2.0, 0.0),
        loss_weights=draw(0.3, 1.0),
    )  # fmt: skip


BATCH = experience()
LOG_PROBS = LogProbs(
    mesh=cast(Mesh, SimpleNamespace(tp_group=None)), vocab_size=VOCABULARY, temperature=0.8, chunk_tokens=4
)
WIDTH = int(BATCH.lengths.max())


def logits(seed: int) -> Tensor:
    return torch.randn(len(RESPONSES), WIDTH, COLUMNS, generator=torch.Generator().manual_seed(seed))


def exact(rows: slice) -> TokenKL:
    """The exact KL to a reference whose logits are given."""

    def term(output: Tensor, log_probs: Tensor, micro: MicroBatch) -> Tensor:
        return LOG_PROBS.exact_kl(output, logits(2)[rows, : micro.length], micro)

    return term


def loss_and_gradient(config: ActorConfig, num_micros: int, num_ranks: int) -> tuple[float, Tensor]:
    """Of the whole minibatch, as shares of every rank's micro-batches add up."""
    parameters = logits(1).requires_grad_()
    mask = BATCH.padded(BATCH.response_mask)
    per_rank = len(RESPONSES) // num_ranks
    parts = [slice(rank * per_rank, (rank + 1) * per_rank) for rank in range(num_ranks)]
    denominators = sum((Denominators.of(mask[part]) for part in parts), Denominators(0, 0))
    total = torch.zeros(())
    for part in parts:
        size = -(-per_rank // num_micros)
        for index, micro in enumerate(micro_batches(BATCH.rows(part.start, part.stop), size)):
            first = part.start + index * size
            rows = slice(first, first + micro.num_sequences)
            kind = config.kl_loss_type
            loss = ActorLoss(
                config, LOG_PROBS, denominators, scale_length=7, entropy_coeff=0.1,
                token_kl=exact(rows) if kind == "full" else estimated_kl(kind)([]),
            )  # fmt: skip
            total = total + loss(parameters[rows, : micro.length], micro).loss
    (gradient,) = torch.autograd.grad(total, parameters)
    return total.item(), gradient


# Every loss with every mean; each meets each KL.
CASES = [(*pair, KL_TYPES[number % 3]) for number, pair in enumerate(itertools.product(LOSSES, MODES))]


@pytest.mark.parametrize(("mode", "mean", "kind"), CASES)
def test_any_cut_gives_the_same_loss_and_gradient(mode: str, mean: str, kind: str) -> None:
    config = ActorConfig.model_validate(
        {"policy_loss": {"loss_mode": mode}, "loss_agg_mode": mean, "use_kl_loss": True, "kl_loss_coef": 0.5,
         "kl_loss_type": kind}
    )  # fmt: skip
    whole, gradient = loss_and_gradient(config, 1, 1)
    assert torch.isfinite(gradient).all() and gradient.abs().max() > 0
    errors = {}
    for cut in CUTS[1:]:
        other, other_gradient = loss_and_gradient(config, *cut)
        errors[cut] = (
            abs(other - whole) / max(abs(whole), 1.0), float((other_gradient - gradient).norm() / gradient.norm())
        )  # fmt: skip
    worst = [max(column) for column in zip(*errors.values(), strict=True)]
    print(
        f"\n{mode:<8} {mean:<24} KL {kind:<11} worst of {len(errors)} cuts: loss {worst[0]:.0e} gradient {worst[1]:.0e}"
    )
    assert max(worst) <= LIMIT, errors


@pytest.mark.parametrize("kind", ["low_var_kl", "full"])
def test_the_loss_is_the_formula_in_float64(kind: Literal["low_var_kl", "full"]) -> None:
    """Token mean of the policy loss with its weights, entropy and KL, written out over the dense softmax."""
    config = ActorConfig(use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type=kind)
    loss, gradient = loss_and_gradient(config, 2, 2)
    dense = logits(1).double().requires_grad_()
    log_p = (dense[..., :VOCABULARY] / 0.8).log_softmax(-1)[:, :-1]
    tokens, mask = BATCH.padded(BATCH.token_ids)[:, 1:], BATCH.padded(BATCH.response_mask)[:, 1:]
    x = log_p.gather(2, tokens[..., None])[..., 0][mask]
    entropy = -(log_p.exp() * log_p).sum(-1)[mask]
    old, ref, advantage, weight = (
        BATCH.padded(BATCH.get(name))[:, 1:][mask].double()
        for name in ("old_log_probs", "ref_log_probs", "advantages", "loss_weights")
    )
    ratio = (x - old).exp()
    surrogate = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
    surrogate = torch.where(advantage < 0, torch.minimum(surrogate, -3 * advantage), surrogate)
    kl = ((ref - x).exp() - (ref - x) - 1).clamp(max=10)
    if kind == "full":
        log_q = (logits(2).double()[..., :VOCABULARY] / 0.8).log_softmax(-1)[:, :-1]
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)[mask]
    expected = (weight * surrogate - 0.1 * entropy + 0.5 * kl).mean()
    (expected_gradient,) = torch.autograd.grad(expected, dense)
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert (gradient - expected_gradient).norm() <= 1e-6 * expected_gradient.norm()
