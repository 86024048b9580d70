"""When the biases of routers move: after a step that was taken, and after no other."""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megappo.engines.optimizer import NonFiniteGradient
from megappo.engines.routing import ExpertRouting, RouterCoefficients
from megappo.engines.training import TrainingEngine
from megappo.models.families.base import MoeShape
from megappo.models.router import Router, Routing
from tests.unit.test_router import EXPERTS, TOP_K, made

LOADS = [[6.0, 1.0, 1.0, 0.0]]


class BareEngine(TrainingEngine):
    """One router, whose passes load the experts as `LOADS` says, and an optimizer of which only the outcome is."""

    def __init__(self, router: Router, rate: float, *, is_finite: bool) -> None:
        self.model, self._chunks, self._router = router, [router], RouterCoefficients(bias_rate=rate)
        mesh: Any = SimpleNamespace(world_group=SimpleNamespace(size=lambda: 1), device=torch.device("cpu"))
        self.mesh, self.routing = mesh, ExpertRouting(router.shared, mesh)
        optimizer: Any = SimpleNamespace(zero_grad=lambda: None, learning_rate=0.1, step=self._step)
        self.optimizer, self._is_finite = optimizer, is_finite

    def _step(self) -> float:
        if not self._is_finite:
            raise NonFiniteGradient("the gradient norm is nan")
        return 1.0

    def _run(self, *_: Any, **__: Any) -> list[Any]:
        self.routing.shared.statistics[:, :EXPERTS] = torch.tensor(LOADS)  # type: ignore[union-attr]
        return []

    def _global_metrics(self, *_: Any) -> dict[str, float]:
        return {}


def engine(rate: float, *, is_finite: bool = True, has_bias: bool = True) -> BareEngine:
    moe = MoeShape(num_experts=EXPERTS, top_k=TOP_K, ffn_size=4, norm_topk_prob=True, has_bias=has_bias)
    return BareEngine(made(Routing(moe, (0,))), rate, is_finite=is_finite)


LOSS: Any = SimpleNamespace(metrics=())


def test_a_step_moves_them_and_tells_the_largest() -> None:
    trained = engine(0.5)
    assert trained.update([], LOSS).routing["router_max_bias"] == 0.5
    assert trained.update([], LOSS).routing["router_max_bias"] == 1.0
    assert trained.model.expert_bias.tolist() == [-1.0, 1.0, 1.0, 1.0]


def test_a_step_that_is_not_taken_leaves_them() -> None:
    trained = engine(0.5, is_finite=False)
    with pytest.raises(NonFiniteGradient):
        trained.update([], LOSS)
    assert trained.model.expert_bias.tolist() == [0.0] * EXPERTS


@pytest.mark.parametrize(("rate", "has_bias"), [(0.0, True), (0.5, False)])
def test_without_a_rate_or_a_bias_nothing_moves(rate: float, has_bias: bool) -> None:
    trained = engine(rate, has_bias=has_bias)
    assert "router_max_bias" not in trained.update([], LOSS).routing
    bias = trained.model.expert_bias
    assert bias is None or bias.tolist() == [0.0] * EXPERTS
