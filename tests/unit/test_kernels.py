"""The report of kernels: what it says of a rank that trains nothing, and of compiled functions."""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from megappo.engines import kernels


def test_a_part_that_a_rank_has_not_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = SimpleNamespace(
        decoder=SimpleNamespace(layers=[]), config=SimpleNamespace(gradient_accumulation_fusion=True)
    )
    monkeypatch.setattr(kernels, "chunks_of", lambda model: [chunk])
    optimizer: Any = SimpleNamespace(kinds=[])
    assert kernels.kernels_of(nn.Linear(1, 1), optimizer) == {
        "gradient norm": "megatron.local_multi_tensor_l2_norm", "weight gradients": "fused_weight_gradient_mlp_cuda"
    }  # fmt: skip


def test_names_of_what_has_no_usual_name() -> None:
    compiled: Any = SimpleNamespace(__module__=None, __name__="multi_tensor_l2norm")
    assert kernels._name(compiled) == "compiled.multi_tensor_l2norm"
    assert kernels._name(partial(max)) == "functools.partial"
