"""What Megatron's optimizer is told of types, where it is refused, and where states of padded buckets lie."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

import megappo.parallel.runtime as runtime
from megappo.config.optim import OptimConfig
from megappo.engines.optimizer_states import check_available, create_state, precision_settings
from megappo.errors import ConfigError
from megappo.parallel.padded_buckets import padded


def test_nothing_is_said_where_all_is_float32() -> None:
    assert precision_settings(OptimConfig()) == {}


def test_types_under_megatrons_names() -> None:
    from megatron.core.optimizer import OptimizerConfig

    settings = precision_settings(
        OptimConfig(
            use_precision_aware_optimizer=True,
            main_grads_dtype="bfloat16",
            main_params_dtype="float16",
            exp_avg_dtype="bfloat16",
        )
    )
    assert settings == {
        "use_precision_aware_optimizer": True,
        "store_param_remainders": False,
        "main_grads_dtype": torch.bfloat16,
        "main_params_dtype": torch.float16,
        "exp_avg_dtype": torch.bfloat16,
        "exp_avg_sq_dtype": torch.float32,
    }
    assert settings.keys() <= {field.name for field in dataclasses.fields(OptimizerConfig)}


def test_without_transformer_engine_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    aware = OptimConfig(use_precision_aware_optimizer=True)
    monkeypatch.setattr(runtime, "has_transformer_engine", lambda: True)
    check_available(aware, "actor.optim")
    monkeypatch.setattr(runtime, "has_transformer_engine", lambda: False)
    check_available(OptimConfig(), "actor.optim")
    with pytest.raises(
        ConfigError, match=r"^critic\.optim\.use_precision_aware_optimizer: true, but Transformer Engine"
    ):
        check_available(aware, "critic.optim")


def test_state_to_load_into() -> None:
    """Torch's AdamW gets what it would make in its first step; one that makes its own is asked for it."""
    parameter = torch.nn.Parameter(torch.ones(3))
    adam = torch.optim.AdamW([parameter])
    create_state(adam)
    assert {key: value.tolist() for key, value in adam.state[parameter].items()} == {
        "step": 0.0, "exp_avg": [0.0] * 3, "exp_avg_sq": [0.0] * 3
    }  # fmt: skip

    class OwnState(torch.optim.AdamW):
        def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
            assert not store_param_remainders
            self.state[param] = {"exp_avg": torch.zeros_like(param, dtype=torch.bfloat16)}

    own = OwnState([parameter])
    create_state(own)
    create_state(own)
    assert list(own.state[parameter]) == ["exp_avg"] and own.state[parameter]["exp_avg"].dtype == torch.bfloat16


def test_padded_buckets_keep_their_places() -> None:
    """Buckets of 3, 2 and 1 elements at 0, 4 and 6 of 8: each but the second ends with padding."""
    buckets = [SimpleNamespace(offset=at, numel_unpadded=size) for at, size in ((0, 3), (4, 2), (6, 1))]
    whole = padded(torch.arange(1.0, 7.0), SimpleNamespace(numel=8, buckets=buckets))
    assert whole.tolist() == [1, 2, 3, 0, 4, 5, 6, 0]
