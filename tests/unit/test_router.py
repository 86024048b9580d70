"""The router on its own: what it takes over, and the gradient of its losses against a float64 reference."""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megappo.models.families.base import MoeShape
from megappo.models.router import Capacity, MicroRouting, Router, RouterLosses, Routing

TOKENS, HIDDEN, EXPERTS, TOP_K = 10, 8, 4, 2
BALANCE, Z = 0.3, 0.05
MOE = MoeShape(num_experts=EXPERTS, top_k=TOP_K, ffn_size=4, norm_topk_prob=True)


def made(routing: Routing) -> Router:
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=1, num_moe_experts=EXPERTS, moe_router_topk=TOP_K,
        moe_router_load_balancing_type="none", moe_router_dtype="fp32", moe_token_dispatcher_type="alltoall",
        add_bias_linear=False, use_cpu_initialization=True,
    )  # fmt: skip
    groups: Any = SimpleNamespace(tp=None, cp=None, tp_cp=None, tp_dp_cp=None)
    router = Router(config, groups, shared=routing)
    router.set_layer_number(1)
    return router


def drawn() -> tuple[Tensor, Tensor]:
    """Hidden states [tokens, 1, H] of which the last is padding, and the router's weight."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(TOKENS, 1, HIDDEN, generator=generator), torch.randn(EXPERTS, HIDDEN, generator=generator)


def reference(hidden: Tensor, weight: Tensor) -> tuple[Tensor, float, float]:
    """The gradient of both losses to the weight, and their values, over the tokens that are no padding."""
    weight = weight.double().requires_grad_()
    logits = hidden[: TOKENS - 1, 0].double() @ weight.T
    scores = logits.softmax(1)
    counts = torch.zeros_like(scores).scatter(1, scores.topk(TOP_K, dim=1).indices, 1.0).sum(0)
    balance = EXPERTS / TOP_K * (counts / (TOKENS - 1) * scores.mean(0)).sum()
    z = logits.logsumexp(1).square().mean()
    (BALANCE * balance + Z * z).backward()
    assert weight.grad is not None
    return weight.grad, float(balance), float(z)


def test_losses_of_any_cut_have_the_gradient_of_the_whole() -> None:
    from megappo.engines.routing import RoutingStatistics

    hidden, weight = drawn()
    expected, balance, z = reference(hidden, weight)
    is_token = torch.arange(TOKENS) < TOKENS - 1
    for cuts in ([TOKENS], [3, 7], [1, 4, 5]):
        routing = Routing(MOE, (0,))
        router = made(routing)
        router.weight.data.copy_(weight)
        routing.begin(MicroRouting(is_token))
        router(hidden)
        loads = routing.statistics[:, :EXPERTS].clone()
        routing.reset()
        pull = BALANCE * EXPERTS / (TOP_K * (TOKENS - 1) ** 2) * loads
        routing.losses = RouterLosses(pull.float(), Z / (TOKENS - 1))
        for part, mask in zip(hidden.split(cuts), is_token.split(cuts), strict=True):
            routing.begin(MicroRouting(mask), is_update=True)
            probs, _ = router(part)
            (probs * 0).sum().backward()
        torch.testing.assert_close(router.weight.grad.double(), expected, rtol=1e-5, atol=1e-7)
        metrics = RoutingStatistics(routing.statistics, EXPERTS, TOP_K).metrics
        assert abs(metrics["router_aux_loss"] - balance) < 1e-6 and abs(metrics["router_z_loss"] - z) < 1e-5


def test_a_choice_that_is_taken_over_has_the_weights_and_gradients_of_its_scores() -> None:
    hidden, weight = drawn()
    taken = torch.tensor([[0, 1], [3, 2]]).repeat(TOKENS // 2, 1)
    taken[-1] = -1  # the router's own
    routing = Routing(MOE, (0,))
    router = made(routing)
    router.weight.data.copy_(weight)
    routing.begin(MicroRouting(torch.ones(TOKENS, dtype=torch.bool), taken[:, None]))
    probs, goes = router(hidden)
    coefficients = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(1))
    (probs * coefficients).sum().backward()

    double = weight.double().requires_grad_()
    scores = (hidden[:, 0].double() @ double.T).softmax(1)
    experts = torch.where(taken == -1, scores.topk(TOP_K, dim=1).indices, taken)
    chosen = scores.gather(1, experts)
    expected = torch.zeros_like(scores).scatter(1, experts, chosen / chosen.sum(1, keepdim=True))
    (expected * coefficients).sum().backward()
    torch.testing.assert_close(probs.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(router.weight.grad.double(), double.grad, rtol=1e-4, atol=1e-6)
    assert torch.equal(goes, expected > 0)


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_an_expert_drops_what_is_over_its_capacity(policy: Any) -> None:
    """9 tokens and one of padding, 2 of 4 experts each: ⌈0.6 · 10 · 2 / 4⌉ = 3 tokens an expert."""
    from megappo.engines.routing import RoutingStatistics

    hidden, weight = drawn()
    is_token = torch.arange(TOKENS) < TOKENS - 1
    routing = Routing(MOE, (0,))
    router = made(routing)
    router.weight.data.copy_(weight)
    routing.begin(MicroRouting(is_token))
    whole, chosen = router(hidden)
    routing.reset()
    routing.capacity = Capacity(0.6, policy)
    generated, _ = router(hidden)
    assert torch.equal(generated, whole), "a pass that nobody asks about drops nothing"

    routing.begin(MicroRouting(is_token))
    probs, goes = router(hidden)
    expected = torch.zeros_like(chosen)
    for expert in range(EXPERTS):
        tokens = (chosen[:, expert] & is_token).nonzero()[:, 0].tolist()
        if policy == "probs":
            tokens.sort(key=lambda token: -float(whole[token, expert]))
        expected[tokens[:3], expert] = True
    assert torch.equal(goes, expected) and torch.equal(probs, whole * expected)
    assert goes.sum(0).max() == 3 and not goes[-1].any()
    choices = TOP_K * (TOKENS - 1)
    metrics = RoutingStatistics(routing.statistics, EXPERTS, TOP_K).metrics
    assert 0 < metrics["router_dropped"] == pytest.approx((choices - int(expected.sum())) / choices)
    assert metrics["router_max_load"] == float((chosen & is_token[:, None]).sum(0).max()) * EXPERTS / choices


def test_megatrons_dispatcher_hears_of_a_capacity() -> None:
    """Without one it takes top_k rows of each token, also of those that were dropped (0.19.2)."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megappo.engines.routing import limit_experts

    layer = object.__new__(MoELayer)
    torch.nn.Module.__init__(layer)
    layer.token_dispatcher = SimpleNamespace(config=SimpleNamespace(moe_expert_capacity_factor=None))
    model = torch.nn.Sequential(layer)
    limit_experts(model, Capacity(0.6))
    assert layer.token_dispatcher.config.moe_expert_capacity_factor is None, "a dense model has nothing to limit"
    model.expert_routing = Routing(MOE, (0,))
    limit_experts(model, Capacity(0.6))
    assert layer.token_dispatcher.config.moe_expert_capacity_factor == 0.6
    assert model.expert_routing.capacity == Capacity(0.6)


def test_biases_go_up_where_the_load_is_under_the_mean() -> None:
    """By hand: the mean load of the second layer, which is this router's, is 4 tokens an expert, and then 4.5."""
    moe = MoeShape(num_experts=EXPERTS, top_k=TOP_K, ffn_size=4, norm_topk_prob=True, score="sigmoid", has_bias=True)
    router = made(Routing(moe, (3, 0)))  # the second of the layers with experts
    memory = router.expert_bias.data_ptr()
    loads = torch.tensor([[9, 9, 0, 0], [4, 7, 2, 3]], dtype=torch.float64)
    assert router.move_bias(loads, 0.5) == 0.5
    assert router.expert_bias.tolist() == [0.0, -0.5, 0.5, 0.5]  # at the mean a bias stays
    router.move_bias(torch.tensor([[0, 0, 0, 0], [5, 4, 5, 4]], dtype=torch.float64), 0.25)
    assert router.expert_bias.tolist() == [-0.25, -0.25, 0.25, 0.75]
    assert router.move_bias(torch.zeros(2, EXPERTS, dtype=torch.float64), 0.25) == 0.75
    assert router.expert_bias.data_ptr() == memory and not router.expert_bias.requires_grad


def test_choices_that_are_taken_over_are_the_load_that_biases_see() -> None:
    hidden, weight = drawn()
    moe = MoeShape(num_experts=EXPERTS, top_k=TOP_K, ffn_size=4, norm_topk_prob=True, score="sigmoid", has_bias=True)
    routing = Routing(moe, (0,))
    router = made(routing)
    router.weight.data.copy_(weight)
    taken = torch.tensor([0, 1]).repeat(TOKENS, 1)[:, None]
    routing.begin(MicroRouting(torch.arange(TOKENS) < TOKENS - 1, taken))
    router(hidden)
    loads = routing.statistics[:, :EXPERTS]
    assert loads.tolist() == [[TOKENS - 1, TOKENS - 1, 0, 0]]  # without padding
    router.move_bias(loads, 0.5)
    assert router.expert_bias.tolist() == [-0.5, -0.5, 0.5, 0.5]
