"""The parts of the vLLM engine that need no vLLM: groups, replacements, what is kept, requests in and out."""

import importlib.util
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

from megappo.config.grid import GenerationGrid, TrainingGrid
from megappo.config.rollout import RolloutConfig
from megappo.engines.rollout import GenerationRequest, SamplingParams
from megappo.engines.vllm import generation
from megappo.engines.vllm.environment import prepare_environment, process_state_kept
from megappo.engines.vllm.patches import _in_given_order, _renumbered, default_group_kept, replaced
from megappo.engines.vllm.start import check_engine, check_experts
from megappo.engines.vllm.transfer import chosen_way
from megappo.errors import ConfigError
from megappo.models.architecture import read_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=3)


def test_groups_of_vllm_become_the_replicas() -> None:
    grid = GenerationGrid(TrainingGrid(tp=4, dp=2), 2)
    made = _renumbered(lambda groups, *rest, **settings: (groups, rest, settings), grid.groups)
    # vLLM's own tensor-parallel groups, and its pipeline groups of one rank each.
    groups, rest, settings = made([[0, 1], [2, 3], [4, 5], [6, 7]], 0, "gloo", group_name="tp")
    assert groups == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert (rest, settings) == ((0, "gloo"), {"group_name": "tp"})
    singles, _, _ = made([[rank] for rank in range(8)])
    assert sorted(singles) == [[rank] for rank in range(8)]


def test_a_family_that_vllm_has_no_layers_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megappo.engines.vllm.start.prepare_environment", lambda: None)
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    config = sizes | {"vocab_size": 100, "max_position_embeddings": 64, "rms_norm_eps": 1e-6}
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "glm"}))
    with pytest.raises(ConfigError, match=r"no layers of its own for model_type 'glm' .* set it to native"):
        check_engine(RolloutConfig(engine="vllm"), read_model(tmp_path), 64)
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "glm4"}))
    check_engine(RolloutConfig(engine="vllm"), read_model(tmp_path), 64)


@pytest.mark.parametrize(
    ("on_cpu", "asked", "ep", "tp", "is_refused"),
    [
        (False, None, 4, 8, True), (False, None, 4, 4, False), (False, None, 1, 8, False), (False, False, 4, 8, False),
        (False, True, 1, 8, True), (True, None, 4, 8, False),
    ],
)  # fmt: skip
def test_replicas_that_can_not_hold_as_many_experts_each_are_refused(
    on_cpu: bool, asked: bool | None, ep: int, tp: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """60 experts over 8 ranks: vLLM gives four of them 8, and the others 7."""
    monkeypatch.setattr("megappo.parallel.runtime.on_cpu", on_cpu)
    config, mesh = RolloutConfig(engine="vllm", enable_expert_parallel=asked), SimpleNamespace(ep=ep)
    spec = SimpleNamespace(shape=SimpleNamespace(moe=SimpleNamespace(num_experts=60)))
    if not is_refused:
        check_experts(config, mesh, spec, tp)  # type: ignore[arg-type]
        return
    with pytest.raises(ConfigError, match=r"60 experts can't .* over the 8 ranks .* to one of 1, 2, 3, 4, 5, 6$"):
        check_experts(config, mesh, spec, tp)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("on_cpu", "quantization", "way"), [(True, None, "load"), (False, "fp8", "load"), (False, None, "direct")]
)
def test_auto_is_direct_where_vllm_leaves_its_parameters_as_they_are(
    on_cpu: bool, quantization: str | None, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megappo.parallel.runtime.on_cpu", on_cpu)
    assert chosen_way("auto", quantization) == way


def test_quantised_parameters_can_be_no_memory_of_training() -> None:
    with pytest.raises(ConfigError, match=r"direct can't be with rollout.quantization: fp8, .* set it to load or auto"):
        chosen_way("direct", "fp8")


def with_sort_ranks(ranks: list[int] | None, backend: str | None = None, sort_ranks: bool = True) -> list[int] | None:
    return sorted(ranks) if ranks and sort_ranks else ranks


def without_sort_ranks(ranks: list[int] | None, backend: str | None = None) -> list[int] | None:
    """As in torch 2.11: `sorted` is looked up in the module's own names first."""
    names = vars(dist.distributed_c10d)
    return names.get("sorted", sorted)(ranks) if ranks else ranks


@pytest.mark.parametrize("new_group", [with_sort_ranks, without_sort_ranks])
def test_groups_keep_the_order_of_their_ranks(new_group: Callable[..., Any]) -> None:
    in_given_order = _in_given_order(new_group)
    assert in_given_order([0, 2, 1, 3], backend="gloo") == [0, 2, 1, 3]
    assert in_given_order([0, 1]) == [0, 1]
    assert in_given_order(None) is None
    assert not hasattr(dist.distributed_c10d, "sorted"), "the replacement is taken back"


def test_a_replacement_without_a_target_is_an_error() -> None:
    owner = SimpleNamespace(there=1)
    with replaced(owner, "there", lambda original: original + 1):
        assert owner.there == 2
    assert owner.there == 1
    with pytest.raises(RuntimeError, match="gone does not exist in this version of vLLM"), replaced(owner, "gone", id):
        pass


def test_the_default_group_outlives_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    destroyed: list[object] = []
    monkeypatch.setattr(dist, "destroy_process_group", lambda group=None: destroyed.append(group))
    with default_group_kept():
        dist.destroy_process_group()
        dist.destroy_process_group("a group of vLLM's")
    dist.destroy_process_group()
    assert destroyed == ["a group of vLLM's", None]


def test_random_numbers_go_on_as_if_vllm_had_drawn_none() -> None:
    def draws() -> tuple[float, float, float]:
        return random.random(), float(numpy.random.rand()), float(torch.rand(()))

    def seed() -> None:
        random.seed(1), numpy.random.seed(1), torch.manual_seed(1)

    seed()
    expected = draws()
    seed()
    set_num_threads, streams = torch.set_num_threads, (torch.cuda.Stream, torch.cuda.Event)
    with pytest.raises(ZeroDivisionError), process_state_kept():
        draws()
        torch.set_num_threads = lambda count: None
        torch.cuda.Stream = torch.cuda.Event = SimpleNamespace  # type: ignore[assignment, misc]
        _ = 1 / 0
    assert draws() == expected
    assert torch.set_num_threads is set_num_threads
    assert (torch.cuda.Stream, torch.cuda.Event) == streams


def test_a_missing_vllm_is_an_error_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"rollout.engine: 'vllm' is not installed here; make setup-gpu .* make setup-vllm"
    ):
        prepare_environment()


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (SamplingParams(temperature=0.005), "0.005 is below 0.01"),
        (SamplingParams(stop=("!",)), "needs vLLM's tokenizer"),
    ],
)
def test_sampling_that_vllm_would_not_do_is_refused(sampling: SamplingParams, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generation.check_sampling(sampling, has_tokenizer=False)


@dataclass
class FakeEngine:
    """Finishes one request a step, the last one first."""

    log_prob: float = -0.5
    waiting: list[tuple[str, Any]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    seeds: list[int | None] = field(default_factory=list)

    def add_request(self, name: str, prompt: dict[str, list[int]], parameters: Any) -> str:
        self.waiting.append((name, prompt))
        self.seeds.append(parameters)
        return f"{name}-internal"

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    def step(self) -> list[Any]:
        name, prompt = self.waiting.pop()
        token = prompt["prompt_token_ids"][0] + 1
        log_probs = [{token: SimpleNamespace(logprob=self.log_prob)}]
        response = SimpleNamespace(token_ids=[token], logprobs=log_probs, finish_reason="stop")
        return [SimpleNamespace(request_id=name, finished=True, outputs=[response])]

    def abort_request(self, names: list[str], internal: bool) -> None:
        assert internal
        self.aborted += names


@pytest.fixture
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests carry their seeds instead of vLLM's parameters."""
    monkeypatch.setattr(generation, "vllm_sampling", lambda sampling, seed, eos_ids: seed)


@pytest.mark.usefixtures("no_vllm")
def test_completions_come_in_the_order_of_the_requests() -> None:
    engine, progress = FakeEngine(), []
    requests = [GenerationRequest((token,), 0) for token in (10, 20, 30)]
    completions = generation.generate(
        engine, requests, GREEDY, [2], str, lambda done, of: progress.append((done, of)), seed_per_request=True
    )
    assert [(each.token_ids, each.log_probs, each.text) for each in completions] == [
        ((11,), (-0.5,), "(11,)"),
        ((21,), (-0.5,), "(21,)"),
        ((31,), (-0.5,), "(31,)"),
    ]
    assert progress == [(1, 3), (2, 3), (3, 3)] and engine.aborted == []


@pytest.mark.usefixtures("no_vllm")
def test_broken_weights_are_an_error_that_leaves_no_requests_behind() -> None:
    engine = FakeEngine(log_prob=float("nan"))
    with pytest.raises(FloatingPointError, match="request 1 are not finite"):
        generation.generate(engine, [GenerationRequest((5,), 0)] * 2, GREEDY, [2], str, None, seed_per_request=True)
    assert engine.aborted == ["0-internal", "1-internal"]


@pytest.mark.usefixtures("no_vllm")
def test_noise_is_seeded_by_request_or_by_batch() -> None:
    def drawn_after(*keys: int, seed_per_request: bool) -> tuple[list[int | None], float]:
        engine = FakeEngine()
        torch.manual_seed(0)
        requests = [GenerationRequest((5,), key) for key in keys]
        generation.generate(engine, requests, GREEDY, [2], str, None, seed_per_request=seed_per_request)
        return engine.seeds, float(torch.rand(()))

    with process_state_kept():
        untouched = drawn_after(seed_per_request=False)
        assert drawn_after(7, 8, seed_per_request=True) == ([7, 8], untouched[1])
        seeds, of_batch = drawn_after(7, 8, seed_per_request=False)
        assert seeds == [None, None]
        assert drawn_after(7, 8, seed_per_request=False)[1] == of_batch
        assert len({drawn_after(8, 7, seed_per_request=False)[1], of_batch, untouched[1]}) == 3
