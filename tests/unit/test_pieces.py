"""Modules that compute on pieces, against float64 products of the whole weights; without ranks."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megappo.engines.hybrid.weights import GenerationWeights, Pieces
from megappo.engines.native.check import check_generation_size
from megappo.engines.native.piece_experts import ExpertsPieces
from megappo.engines.native.pieces import (
    ColumnPieces,
    MLPPieces,
    NormPieces,
    OutputPieces,
    PieceModule,
    RowPieces,
    VocabularyPieces,
)
from megappo.engines.native.ranks import DecodingRanks
from megappo.errors import ConfigError
from megappo.models.families.base import LatentShape, ModelShape, MoeShape
from megappo.models.router import Routing


class OneRank:
    """A process group of one."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def ranks(place: int = 0) -> DecodingRanks:
    group: Any = OneRank()
    # In the order of shards, this rank (number 0 in its group) is the `place`-th; nobody else is asked.
    order = (*range(1, place + 1), 0)
    return DecodingRanks(torch.device("cpu"), group, group, group, order, drawing_rank=0, sequence_alignment=1)


def bound(module: PieceModule, weights: GenerationWeights, place: int = 0) -> Any:
    for name, part in module.named_modules():
        cast(PieceModule, part).bind(weights, ranks(place), f"layer.mlp.{name}".rstrip("."))
    return module


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cut(whole: Tensor, axis: int, sizes: tuple[int, ...]) -> Pieces:
    """Parts of the given sizes; each lies inside of a larger tensor that is NaN around it."""
    parts = []
    for part in whole.split(sizes, dim=axis):
        larger = torch.full([size + 3 for size in part.shape], torch.nan, dtype=part.dtype)
        inside = larger[tuple(slice(1, 1 + size) for size in part.shape)]
        parts.append(inside.copy_(part))
    return tuple(parts)


@pytest.mark.parametrize("sizes", [(8,), (3, 5), (1, 4, 1, 2)])
def test_rows_in_pieces_give_the_product_with_the_whole_weight(sizes: tuple[int, ...]):
    weight, bias, hidden = random(8, 6), random(8, seed=1), random(5, 1, 6, seed=2)
    parameters = {"layer.mlp.weight": cut(weight, 0, sizes), "layer.mlp.bias": cut(bias, 0, (6, 2))}
    output, nothing = bound(ColumnPieces(), GenerationWeights(parameters))(hidden)
    torch.testing.assert_close(output, hidden @ weight.T + bias)
    assert nothing is None
    logits, _ = bound(OutputPieces(), GenerationWeights(parameters))(hidden)
    torch.testing.assert_close(logits, hidden @ weight.T)


@pytest.mark.parametrize("sizes", [(6,), (2, 4), (1, 2, 1, 2)])
def test_columns_in_pieces_give_the_product_with_the_whole_weight(sizes: tuple[int, ...]):
    weight, hidden = random(8, 6), random(5, 1, 6, seed=2)
    output, _ = bound(RowPieces(), GenerationWeights({"layer.mlp.weight": cut(weight, 1, sizes)}))(hidden)
    torch.testing.assert_close(output, hidden @ weight.T)


def test_a_dense_part_takes_gate_rows_before_up_rows():
    gate_up, down, hidden = random(8, 6), random(6, 4, seed=1), random(5, 1, 6, seed=2)
    weights = GenerationWeights(
        {
            "layer.mlp.linear_fc1.weight": cut(gate_up, 0, (3, 3, 2)),
            "layer.mlp.linear_fc2.weight": cut(down, 1, (1, 3)),
        }
    )
    gate, up = hidden @ gate_up[:4].T, hidden @ gate_up[4:].T
    output, _ = bound(MLPPieces(), weights)(hidden)
    torch.testing.assert_close(output, (gate / (1 + (-gate).exp()) * up) @ down.T)


def test_a_norm_divides_by_the_root_mean_square():
    weight, hidden = random(6), random(5, 1, 6, seed=2)
    output = bound(NormPieces(eps=1e-2), GenerationWeights({"layer.mlp.weight": (weight,)}))(hidden)
    torch.testing.assert_close(output, hidden / (hidden.square().mean(-1, keepdim=True) + 1e-2).sqrt() * weight)


def test_a_token_is_looked_up_where_its_row_is_and_zero_elsewhere():
    table = random(6, 4)
    weights = GenerationWeights({"layer.mlp.weight": cut(table, 0, (1, 3, 2))})
    # The second of the shards: ids 6 to 11 are here.
    output = bound(VocabularyPieces(), weights, place=1)(torch.tensor([[6, 11, 0, 9], [5, 12, 7, 10]]))
    zero = torch.zeros(4, dtype=torch.float64)
    expected = [[table[0], table[5], zero, table[3]], [zero, zero, table[1], table[4]]]
    torch.testing.assert_close(output, torch.stack([torch.stack(row) for row in expected]))


def reference(hidden: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, held: list[int], norm: bool) -> Tensor:
    """Token by token: the outputs of the two most probable experts that are held, times their probabilities."""
    rows = []
    for token in hidden.flatten(0, 1):
        scores = (router @ token).softmax(0)
        best = sorted(range(len(scores)), key=lambda expert: -scores[expert].item())[:2]
        total = sum(scores[expert] for expert in best) if norm else 1.0
        row = torch.zeros_like(token)
        for expert in best:
            if expert in held:
                gate, up = (gate_up[expert] @ token).chunk(2)
                row += scores[expert] / total * (down[expert] @ (gate * gate.sigmoid() * up))
        rows.append(row)
    return torch.stack(rows).view_as(hidden)


@pytest.mark.parametrize("norm", [True, False])
def test_a_rank_adds_up_the_experts_that_it_holds_and_the_shared_one(norm: bool):
    router, gate_up, down = random(4, 6), random(4, 10, 6, seed=1), random(4, 6, 5, seed=2)
    shared_gate_up, shared_down, shared_gate = random(6, 6, seed=3), random(6, 3, seed=4), random(1, 6, seed=5)
    hidden, held = random(7, 1, 6, seed=6), [3, 1]
    weights = GenerationWeights(
        parameters={
            "layer.mlp.router.weight": (router,),
            "layer.mlp.shared_experts.linear_fc1.weight": cut(shared_gate_up, 0, (2, 4)),
            "layer.mlp.shared_experts.linear_fc2.weight": cut(shared_down, 1, (2, 1)),
            "layer.mlp.shared_experts.gate_weight": (shared_gate,),
        },
        experts={
            "layer.mlp.experts.weight1": {expert: cut(gate_up[expert], 0, (4, 6)) for expert in held},
            "layer.mlp.experts.weight2": {expert: cut(down[expert], 1, (2, 3)) for expert in held},
        },
    )
    moe = MoeShape(
        num_experts=4, top_k=2, ffn_size=5, shared_ffn_size=3, has_shared_gate=True, norm_topk_prob=norm,
        dense_layers=frozenset(),
    )  # fmt: skip
    gate, up = (hidden @ shared_gate_up.T).chunk(2, dim=-1)
    shared = (gate * gate.sigmoid() * up) @ shared_down.T * (hidden @ shared_gate.T).sigmoid()
    output, _ = bound(ExpertsPieces(moe, 0, Routing(moe, (0,))), weights)(hidden)
    expected = reference(hidden, router, gate_up, down, held, norm) + shared
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)  # the router computes in float32


def test_sizes_that_cut_a_model_unevenly_are_refused_with_those_that_do_not():
    shape = ModelShape(
        num_layers=1, hidden_size=32, ffn_size=48, num_heads=12, num_kv_heads=4, head_dim=8, vocab_size=100,
        max_positions=64, norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, tied=False,
    )  # fmt: skip
    check_generation_size(shape, 12)
    with pytest.raises(ConfigError, match=r"_size: 3 does not divide .* 12 attention heads, .* possible: 1, 2, 4, 12$"):
        check_generation_size(shape, 3)
    with_experts = replace(shape, moe=MoeShape(num_experts=6, top_k=2, ffn_size=5))
    with pytest.raises(ConfigError, match=r"rows, 6 experts; possible: 1, 2$"):
        check_generation_size(with_experts, 4)
    with_latents = replace(shape, latent=LatentShape(q_rank=None, kv_rank=16, rope_head_dim=2, value_head_dim=4))
    with pytest.raises(ConfigError, match=r"rows, 18 and 0 latent rows; possible: 1, 2$"):
        check_generation_size(with_latents, 4)


def test_a_module_without_weights_says_so():
    with pytest.raises(AssertionError, match="before it was bound"):
        ColumnPieces()(random(1, 6))
