"""The experts of vLLM's tokens beside its KV cache, without vLLM: what is written where, and what a request leaves."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megappo.engines.rollout import Completion, GenerationRequest
from megappo.engines.vllm import experts
from megappo.engines.vllm.expert_table import ExpertTable, routers_of
from megappo.engines.vllm.experts import ExpertStore
from megappo.models.families.base import MoeShape

CPU = torch.device("cpu")
MOE = MoeShape(num_experts=8, top_k=2, ffn_size=4)
LAYERS = (1, 3)
BLOCK = 4


def numbers(*first: int) -> Tensor:
    """A router's choice [tokens, 2]: each first expert with the one after it."""
    return torch.tensor([[one, one + 1] for one in first], dtype=torch.int32)


def test_each_token_is_written_to_its_slot_and_padding_to_none() -> None:
    table = ExpertTable(2, 8, MOE, CPU)
    table.write(0, torch.tensor([5, 2, -1]), numbers(0, 1, 6))
    table.write(1, torch.tensor([5, 2]), numbers(3, 4, 6))  # a token more than slots
    assert table.read(torch.tensor([2, 5])).tolist() == [[[1, 2], [4, 5]], [[0, 1], [3, 4]]]
    others = torch.tensor([0, 1, 3, 4, 6, 7])
    assert (table.read(others) == table.nothing).all()
    table.clear()
    assert (table.read(torch.arange(8)) == table.nothing).all()


@pytest.mark.parametrize(("num_experts", "dtype"), [(255, torch.uint8), (256, torch.int16), (1000, torch.int16)])
def test_numbers_of_all_experts_fit_beside_nothing(num_experts: int, dtype: torch.dtype) -> None:
    moe = MoeShape(num_experts=num_experts, top_k=2, ffn_size=4)
    table = ExpertTable(1, 4, moe, CPU)
    table.write(0, torch.tensor([3]), numbers(num_experts - 2))
    (row,) = table.read(torch.tensor([3]))
    assert row.tolist() == [[num_experts - 2, num_experts - 1]] and row.dtype == dtype
    assert table.nothing not in range(num_experts)


def test_routers_are_found_by_their_layer() -> None:
    """In two modules of a layer, as vLLM 0.32 has them; dense layers have none, and 10 comes after 2."""

    class Router:
        def set_capture_fn(self, function: Any) -> None: ...

    routers = {number: Router() for number in (2, 10)}
    layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(11))
    for number, router in routers.items():
        layer, experts = nn.Module(), nn.Module()
        layer.experts, experts.inner = experts, nn.Module()  # type: ignore[assignment]
        experts.router = experts.inner.router = router  # type: ignore[assignment]
        layers[number] = layer
    model = nn.Module()
    model.model = nn.Module()
    model.model.layers = layers  # type: ignore[assignment]
    assert routers_of(model) == routers and list(routers_of(model)) == [2, 10]


class Scheduler:
    """Gives and takes blocks as vLLM's does: those of a request are gone once it ends or is preempted."""

    def __init__(self) -> None:
        self.blocks: dict[str, list[int]] = {}
        self.kv_cache_manager = SimpleNamespace(get_block_ids=lambda name: (self.blocks[name],))

    def _free_blocks(self, request: Any) -> None:
        del self.blocks[request.request_id]

    def _preempt_request(self, request: Any, timestamp: float, **settings: Any) -> None:
        del self.blocks[request.request_id]
        request.num_computed_tokens = 0


def request(name: str, computed: int, drawn: int, prompt: int = 5) -> Any:
    return SimpleNamespace(
        request_id=name, num_computed_tokens=computed, num_tokens=prompt + drawn, num_output_tokens=drawn
    )


class Engine:
    """A store with a cache of eight blocks of four slots, and the scheduler that it follows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(experts, "_of_first_rank", lambda rows, device: rows)
        self.store = ExpertStore(LAYERS, MOE)
        self.table = ExpertTable(len(LAYERS), 8 * BLOCK, MOE, CPU)
        self.store._table, self.store._block_size = self.table, BLOCK
        self.scheduler = Scheduler()
        core = SimpleNamespace(scheduler=self.scheduler)
        self.store.follow(SimpleNamespace(engine_core=SimpleNamespace(engine_core=core)))

    def computes(self, name: str, first: int, *choices: int) -> None:
        """A forward of tokens of a request, from its token `first` on: layer 1 chooses `choices`, layer 3 the next."""
        blocks = self.scheduler.blocks[name]
        places = range(first, first + len(choices))
        slots = torch.tensor([blocks[place // BLOCK] * BLOCK + place % BLOCK for place in places])
        self.table.write(0, slots, numbers(*choices))
        self.table.write(1, slots, numbers(*(one + 1 for one in choices)))

    def completed(self, name: str, prompt: int, response: int) -> list[list[list[int]]]:
        completion = Completion(tuple(range(response)), (0.0,) * response, "", "stop")
        (one,) = self.store.completed([name], [GenerationRequest(tuple(range(prompt)), 0)], [completion])
        assert one.routed_experts is not None and one.routed_experts.dtype == torch.int16
        assert one.token_ids == completion.token_ids
        return one.routed_experts.tolist()


def expected(*choices: int) -> list[list[list[int]]]:
    return [[[one, one + 1], [one + 1, one + 2]] for one in choices] + [[[-1, -1], [-1, -1]]]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(monkeypatch)


def test_a_request_leaves_the_rows_of_its_blocks(engine: Engine) -> None:
    """A prompt in two chunks, two tokens drawn; blocks in any order, the first one another request's too."""
    engine.scheduler.blocks |= {"a": [6, 2], "b": [6, 3]}
    engine.computes("a", 0, 0, 1, 2)
    engine.computes("a", 3, 3, 4)
    engine.computes("a", 5, 5)
    engine.computes("b", 4, 0)  # its first four tokens were found in the cache
    engine.computes("b", 5, 1, 2)  # the last one of it is drawn while another forward runs
    engine.scheduler._free_blocks(request("a", 6, 2))
    engine.scheduler._free_blocks(request("b", 8, 2))
    assert engine.scheduler.blocks == {}
    assert engine.completed("a", 5, 2) == expected(0, 1, 2, 3, 4, 5)
    assert engine.completed("b", 5, 2) == expected(0, 1, 2, 3, 0, 1)


def test_a_preempted_request_keeps_what_its_tokens_were_drawn_with(engine: Engine) -> None:
    engine.scheduler.blocks["a"] = [0, 1]
    engine.computes("a", 0, 0, 1, 2, 3, 4)
    engine.computes("a", 5, 5)
    interrupted = request("a", 6, 2)
    engine.scheduler._preempt_request(interrupted, 0.0, drop_stale_output=False)
    assert interrupted.num_computed_tokens == 0
    engine.scheduler.blocks["a"] = [4, 0]
    engine.computes("a", 0, 5, 5, 5, 5, 5, 5, 2)  # other choices, and one token more
    engine.computes("a", 7, 3)
    engine.scheduler._free_blocks(request("a", 8, 4))
    assert engine.completed("a", 5, 4) == expected(0, 1, 2, 3, 4, 5, 2, 3)


def test_a_prompt_that_was_preempted_leaves_what_its_tokens_were_drawn_with(engine: Engine) -> None:
    engine.scheduler.blocks["a"] = [0, 1]
    engine.computes("a", 0, 0, 0, 0)
    engine.scheduler._preempt_request(request("a", 3, 0), 0.0)
    engine.scheduler.blocks["a"] = [2, 3]
    engine.computes("a", 0, 1, 2, 3, 4, 5)
    engine.scheduler._free_blocks(request("a", 5, 1))
    assert engine.completed("a", 5, 1) == expected(1, 2, 3, 4, 5)


def test_a_response_that_was_cut_after_more_was_drawn(engine: Engine) -> None:
    """By a stop string, which is found when further tokens are under way."""
    engine.scheduler.blocks["a"] = [0, 1]
    engine.computes("a", 0, 0, 1, 2, 3, 4, 5, 0)
    engine.scheduler._free_blocks(request("a", 7, 3))
    assert engine.completed("a", 5, 1) == expected(0, 1, 2, 3, 4)


def test_tokens_that_no_router_was_asked_for_are_an_error(engine: Engine) -> None:
    engine.scheduler.blocks["a"] = [0, 1]
    engine.computes("a", 0, 0, 1, 2, 3)
    engine.scheduler._free_blocks(request("a", 5, 1))
    with pytest.raises(RuntimeError, match="a kernel that chooses them too"):
        engine.completed("a", 5, 1)


def test_what_nobody_waits_for_is_forgotten(engine: Engine) -> None:
    engine.scheduler.blocks |= {"a": [0, 1], "never computed": []}
    engine.computes("a", 0, 0, 1, 2, 3, 4)
    engine.scheduler._free_blocks(request("a", 5, 1))
    engine.scheduler._free_blocks(request("never computed", 0, 0))
    engine.store.forget()
    with pytest.raises(KeyError):
        engine.completed("a", 5, 1)


def test_another_scheduler_is_refused() -> None:
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=SimpleNamespace(_free_blocks=print)))
    with pytest.raises(RuntimeError, match="_preempt_request does not exist in this version of vLLM"):
        ExpertStore(LAYERS, MOE).follow(SimpleNamespace(engine_core=core))
