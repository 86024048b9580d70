"""Which experts vLLM sent each token to: written beside the KV cache in the forward itself, read when a request ends.

A token that is found in the prefix cache brings along the experts of the time when its block was computed. The hooks of
the routers write to memory that stays where it is: CUDA graphs, captured later, write there too. Seen with vLLM 0.20.2
(CUDA) and 0.32.0 (CPU). Imports vllm only when asked to.
"""

import megappo.parallel.runtime as runtime  # isort: skip  before megatron

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.engines.rollout import Completion, GenerationRequest
from megappo.engines.vllm.expert_table import ExpertTable, Rows, routers_of, table_dtype
from megappo.engines.vllm.patches import replace_method, replaced
from megappo.models.families.base import MoeShape
from megappo.models.routing import EXPERT_DTYPE, NO_EXPERT


class ExpertStore:
    """The choices of one engine's requests in `layers`, those with experts, counted over the model.

    `starting` surrounds the start of vLLM, and `follow` comes after it. Each call that generates ends with `completed`.
    """

    def __init__(self, layers: Sequence[int], moe: MoeShape) -> None:
        self._layers = tuple(layers)
        self._moe = moe
        self._table: ExpertTable | None = None
        self._block_size = 0
        self._kept: dict[str, list[Rows]] = {}

    @contextmanager
    def starting(self) -> Iterator[None]:
        """While inside, an engine that starts gets its table, before graphs are captured: where its KV cache is, and
        out of the cache's share of the memory. Raises RuntimeError where vLLM has gone another way."""
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # the CPU's is one of it
        from vllm.v1.worker.gpu_worker import Worker

        with (
            replaced(GPUModelRunner, "initialize_kv_cache", self._with_table),
            replaced(Worker, "determine_available_memory", self._with_share),
        ):
            yield
        if self._table is None:
            raise RuntimeError(
                "vLLM made its cache without GPUModelRunner.initialize_kv_cache; set router_replay to off"
            )

    def _with_table(self, initialize: Callable[..., None]) -> Callable[..., None]:
        def initialized(runner: Any, kv_cache_config: Any, is_profiling: bool = False, **settings: Any) -> None:
            initialize(runner, kv_cache_config, is_profiling, **settings)
            if not is_profiling:  # that is a small cache, for a moment
                self._install(runner)

        return initialized

    def _with_share(self, determine: Callable[[Any], int]) -> Callable[[Any], int]:
        def determined(worker: Any) -> int:
            specs = worker.get_kv_cache_spec().values()
            cache = sum(spec.page_size_bytes / spec.block_size for spec in specs)
            table = len(self._layers) * self._moe.top_k * table_dtype(self._moe).itemsize
            return int(determine(worker) * cache / (cache + table))

        return determined

    def _install(self, runner: Any) -> None:
        config, routers = runner.kv_cache_config, routers_of(runner.get_model())
        # With several, a token has several slots, and blocks outside of a window go before their request ends.
        assert len(config.kv_cache_groups) == 1, "vLLM has several kinds of KV caches for layers that are alike"
        if tuple(routers) != self._layers:
            raise RuntimeError(f"vLLM has routers in layers {tuple(routers)}, and the model has them in {self._layers}")
        self._block_size = config.kv_cache_groups[0].kv_cache_spec.block_size
        self._table = ExpertTable(len(routers), config.num_blocks * self._block_size, self._moe, runner.device)
        for place, router in enumerate(routers.values()):
            router.set_capture_fn(_writer(self._table, place))

    def follow(self, engine: Any) -> None:
        """From now on requests of an `LLMEngine` leave their choices here before their blocks are given away."""
        scheduler = engine.engine_core.engine_core.scheduler

        def keeping(call: Callable[..., Any]) -> Callable[..., Any]:
            def called(request: Any, *arguments: Any, **settings: Any) -> Any:
                self._keep(request, scheduler.kv_cache_manager)
                return call(request, *arguments, **settings)

            return called

        replace_method(scheduler, "_free_blocks", keeping)
        replace_method(scheduler, "_preempt_request", keeping)

    def _keep(self, request: Any, cache: Any) -> None:
        """Of a request that lost its blocks before, the choices that its tokens were drawn with stay: computed again,
        they may be others. Where nothing was drawn yet, the later ones count."""
        assert self._table is not None
        parts = self._kept.get(request.request_id, [])
        # A step that is under way has computed more than is known of: its rows are read behind it, on the same stream.
        first, stop = sum(map(len, parts)), min(request.num_computed_tokens, request.num_tokens)
        if first >= stop or not request.num_output_tokens:
            return
        (blocks,) = cache.get_block_ids(request.request_id)
        slots = torch.tensor(blocks)[:, None] * self._block_size + torch.arange(self._block_size)
        self._kept[request.request_id] = [*parts, self._table.read(slots.flatten()[first:stop])]

    def forget(self) -> None:
        """What was kept belongs to requests that nobody waits for."""
        self._kept.clear()

    def clear(self) -> None:
        """The cache is empty: no later request finds anything in it."""
        assert self._table is not None
        self._table.clear()

    def completed(
        self, engine_ids: Sequence[str], requests: Sequence[GenerationRequest], completions: Sequence[Completion]
    ) -> list[Completion]:
        """The completions with `routed_experts`, those that the first rank of the replica has; its ranks all call it.

        The last token was drawn, and its forward, if there was one, is nobody's: it has no experts. Raises RuntimeError
        where vLLM has computed tokens past its routers.
        """
        assert self._table is not None
        if not runtime.on_cpu:
            torch.cuda.synchronize()
        result = []
        for engine_id, request, completion in zip(engine_ids, requests, completions, strict=True):
            length = len(request.prompt_ids) + len(completion.token_ids) - 1
            rows = torch.cat(self._kept.pop(engine_id))[:length]
            assert len(rows) == length, f"{len(rows)} of {length} computed tokens of a request have left their experts"
            rows = _of_first_rank(rows, self._table.device)
            if bool((rows == self._table.nothing).any()):
                raise RuntimeError("vLLM computes experts in a kernel that chooses them too; set router_replay to off")
            experts = torch.full((length + 1, *rows.shape[1:]), NO_EXPERT, dtype=EXPERT_DTYPE)
            experts[:length] = rows
            result.append(dataclasses.replace(completion, routed_experts=experts))
        return result


def _writer(table: ExpertTable, layer: int) -> Callable[[Tensor], None]:
    """What a router calls in its forward, with its choice."""
    from vllm.forward_context import get_forward_context

    def write(experts: Tensor) -> None:
        slots = get_forward_context().slot_mapping
        assert isinstance(slots, dict), "vLLM cuts its batches in two, and their slots are not told apart here"
        if slots:  # by the layers of attention, all alike; none while there is no cache
            table.write(layer, next(iter(slots.values())), experts)

    return write


def _of_first_rank(rows: Rows, device: torch.device) -> Rows:
    """All ranks of a replica choose for all its tokens, and alike; what is trained on has to be the same for sure."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return rows
    sent = rows.to(device).contiguous().view(torch.uint8)  # no backend sends int16
    dist.broadcast(sent, group.ranks[0], group.device_group)
    return sent.view(rows.dtype).cpu()
