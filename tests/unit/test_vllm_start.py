"""What vLLM is started with: every setting of the configuration reaches it, under vLLM's name of it."""

import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megappo.config.grid import GenerationGrid, TrainingGrid
from megappo.config.rollout import RolloutConfig
from megappo.engines.vllm import start
from megappo.engines.vllm.start import start_engine, uses_expert_parallel

MOE = SimpleNamespace(num_groups=1, score="softmax", has_bias=False, norm_topk_prob=True, top_groups=1)


class LLM:
    """Takes vLLM's place, and keeps what it was given."""

    def __init__(self, model: str, **settings: Any) -> None:
        self.model = model
        self.settings = settings


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The groups and the token with which the engine started, and the loader that was registered."""
    seen: list[Any] = []

    @contextmanager
    def starting(groups: Any, token: str) -> Any:
        seen.append(groups)
        yield

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=LLM))
    monkeypatch.setattr(start, "register_loader", lambda name, load: seen.append((name, load)))
    monkeypatch.setattr(start, "broadcast_object", lambda value, group, source: "token")
    monkeypatch.setattr(start, "starting", starting)
    return seen


def mesh_of(grid: TrainingGrid) -> Any:
    return SimpleNamespace(is_writer=True, world_group=None, ep=grid.ep, training_grid=grid)


def settings_of(
    config: RolloutConfig, *, moe: Any = None, latent: Any = None, grid: TrainingGrid | None = None, size: int = 1
) -> dict[str, Any]:
    grid = grid or TrainingGrid()
    spec: Any = SimpleNamespace(shape=SimpleNamespace(moe=moe, latent=latent), folder=Path("folder"))
    llm = start_engine(
        config, spec, mesh_of(grid), GenerationGrid(grid, size), print, dtype=torch.bfloat16, tokenizer_folder="words",
        max_model_len=321, seed=17,
    )  # fmt: skip
    assert llm.model == "folder"
    return dict(llm.settings)


# Every value differs from megappo's default and from vLLM's.
CONFIGURED = RolloutConfig(
    engine="vllm",
    gpu_memory_utilization=0.37,
    enforce_eager=True,
    enable_prefix_caching=False,
    enable_chunked_prefill=False,
    max_num_seqs=19,
    max_num_batched_tokens=1234,
    quantization="fp8",
    free_cache_engine=False,
    stop=("!",),
)


def test_every_setting_reaches_vllm_on_a_gpu(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megappo.parallel.runtime.on_cpu", False)
    assert settings_of(CONFIGURED) == {
        "tokenizer": "words",
        "skip_tokenizer_init": False,
        "load_format": "megappo",
        "generation_config": "vllm",
        "hf_overrides": {},
        "dtype": torch.bfloat16,
        "quantization": "fp8",
        "seed": 17,
        "distributed_executor_backend": "external_launcher",
        "tensor_parallel_size": 1,
        "enable_expert_parallel": False,
        "max_model_len": 321,
        "max_num_seqs": 19,
        "max_num_batched_tokens": 1234,
        "gpu_memory_utilization": 0.37,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "enable_sleep_mode": False,
        "disable_custom_all_reduce": False,
        "async_scheduling": None,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
    }
    assert started == [("megappo", print), ((0,),)]


def test_the_defaults_of_a_gpu(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megappo.parallel.runtime.on_cpu", False)
    settings = settings_of(RolloutConfig(engine="vllm"))
    expected = {
        "skip_tokenizer_init": True,
        "quantization": None,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.5,
        "enforce_eager": False,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "enable_sleep_mode": True,
    }
    assert {name: settings[name] for name in expected} == expected


def test_replicas_of_several_ranks_schedule_alike(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank alone comes to the same: asynchronous scheduling, which asks the clock, is off."""
    monkeypatch.setattr("megappo.parallel.runtime.on_cpu", False)
    settings = settings_of(RolloutConfig(engine="vllm"), grid=TrainingGrid(tp=4), size=2)
    assert (settings["tensor_parallel_size"], settings["async_scheduling"]) == (2, False)
    assert started[-1] == ((0, 2), (1, 3))


@pytest.mark.parametrize("most", [1, 2])
def test_no_all_reduce_writes_into_a_gpu_that_ranks_share(
    most: int, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGAPPO_RANKS_PER_GPU", str(most))
    settings = settings_of(RolloutConfig(engine="vllm"), grid=TrainingGrid(tp=2), size=2)
    assert settings["disable_custom_all_reduce"] == (most == 2)


@pytest.mark.parametrize(("on_cpu", "backend"), [(False, "triton"), (True, None)])
def test_experts_run_on_kernels_that_leave_their_order(
    on_cpu: bool, backend: str | None, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megappo.parallel.runtime.on_cpu", on_cpu)
    assert settings_of(RolloutConfig(engine="vllm"), moe=MOE).get("moe_backend") == backend
    assert "moe_backend" not in settings_of(RolloutConfig(engine="vllm"))


def test_a_cpu_has_neither_graphs_nor_sleep(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megappo.parallel.runtime.on_cpu", True)
    settings = settings_of(RolloutConfig(engine="vllm"), latent=SimpleNamespace())
    assert (settings["enforce_eager"], settings["enable_sleep_mode"]) == (True, False)
    assert settings["compilation_config"] == {"custom_ops": ["all", "-rotary_embedding"]}


@pytest.mark.parametrize(
    ("configured", "on_cpu", "ep", "moe", "expected"),
    [
        (None, False, 2, MOE, True),
        (None, False, 1, MOE, False),  # training spreads no experts
        (None, False, 2, None, False),  # there are none
        (None, True, 2, MOE, False),  # vLLM can't on a CPU
        (True, False, 1, MOE, True),
        (False, False, 2, MOE, False),
    ],
)
def test_whole_experts_on_a_rank_where_training_spreads_them(
    configured: bool | None,
    on_cpu: bool,
    ep: int,
    moe: Any,
    expected: bool,
    started: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megappo.parallel.runtime.on_cpu", on_cpu)
    config = RolloutConfig(engine="vllm", enable_expert_parallel=configured)
    grid = TrainingGrid(dp=2, ep=ep)
    spec: Any = SimpleNamespace(shape=SimpleNamespace(moe=moe))
    assert uses_expert_parallel(config, mesh_of(grid), spec) is expected
    assert settings_of(config, moe=moe, grid=grid, size=2)["enable_expert_parallel"] is expected
