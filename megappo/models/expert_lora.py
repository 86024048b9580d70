"""The adapters of a layer's experts, grouped or modules of their own: an A and a B for each expert and projection."""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from torch import Tensor, nn

from megappo.config.lora import LoraConfig
from megappo.models.adapter_map import AdapterTarget
from megappo.models.experts import GroupedExperts, grouped_product
from megappo.models.families.experts import EXPERTS_DOWN, EXPERTS_GATE_UP
from megappo.models.lora import Adapter
from megappo.parallel.mesh import Mesh

# A grouped parameter's name in its layer → the same weights' linear layer in a Megatron expert.
_LINEARS = {EXPERTS_GATE_UP: "linear_fc1", EXPERTS_DOWN: "linear_fc2"}


class ExpertsAdapter(Adapter):
    """ΔW = alpha / rank · B · A of each of this rank's experts, in one linear layer of them all.

    `lora_A` [experts, rank, in] and `lora_B` [experts, rows, rank] of each adapted projection. Over expert TP ranks,
    column-parallel: B's rows are cut, A is whole; row-parallel: A's columns are cut, B is whole. Either way the product
    is this rank's part of what the layer's own is a part of, so that tokens need no communication here; what is whole
    has a part of its gradient on each rank, and these are added up.
    """

    def __init__(
        self, target: AdapterTarget, lora: LoraConfig, mesh: Mesh, weights: Sequence[nn.Parameter], first: int
    ) -> None:
        """`weights`: the frozen ones, [experts, rows, in] of all local experts or [rows, in] of each. `first`: the
        number of the first local expert in its layer."""
        super().__init__()
        self.weights = tuple(weights)  # in a tuple: they are no parameters of this module
        self._mesh = mesh
        self._scaling = lora.alpha / lora.rank
        self._first = first
        self._is_row_parallel = target.is_row_parallel
        self._cut_axis = 2 if target.is_row_parallel else 1
        like = weights[0]
        num_experts = len(weights) if like.dim() == 2 else like.shape[0]
        names = [source.removesuffix(".weight").rpartition(".")[2] for source in target.rule.sources]
        adapted = [name.rpartition(".")[2] for name in target.projections]
        rows, columns = like.shape[-2] // len(names), like.shape[-1]
        self._rows = {name: (rows, name in adapted) for name in names}  # in the order of the layer's rows

        def parameters(*shape: int) -> nn.ParameterDict:
            empty = {name: torch.zeros(num_experts, *shape, dtype=like.dtype, device=like.device) for name in adapted}
            return nn.ParameterDict({name: nn.Parameter(tensor) for name, tensor in empty.items()})

        self.lora_A, self.lora_B = parameters(lora.rank, columns), parameters(rows, lora.rank)
        self._apart: dict[str, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}
        self._mark()
        self.eval()

    def change(self, product: Tensor, tokens: Tensor, tokens_per_expert: Tensor) -> Tensor:
        """The layer's `product` [tokens, rows] of `tokens` [tokens, in], sorted by local expert, with ΔW's part."""
        if not self.enabled:
            return product
        stacks = {name: (self.lora_A[name], self.lora_B[name]) for name in self.lora_A}
        return product + self._scaling * self._added(tokens, tokens_per_expert, stacks)

    def take_apart(self, experts: nn.Module, _: tuple[Any, ...]) -> None:
        """The hook before the experts of a layer, where each is a module: A and B of each, cut once for all of them.

        A slice for each expert would fill a gradient of all experts' size for each.
        """
        self._apart = {name: (self.lora_A[name].split(1), self.lora_B[name].split(1)) for name in self.lora_A}

    def put_away(self, experts: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """The hook behind the experts of a layer."""
        self._apart = {}

    def change_output(self, place: int, linear: nn.Module, inputs: tuple[Any, ...], output: tuple[Tensor, Any]) -> Any:
        """The hook of local expert `place`'s linear layer: its (output [tokens, rows], bias) with ΔW's part."""
        if not self.enabled:
            return None
        plain, bias = output
        count = torch.tensor([len(inputs[0])])
        own = {name: (a[place], b[place]) for name, (a, b) in self._apart.items()}
        return plain + self._scaling * self._added(inputs[0], count, own), bias

    def merged(self, weight: Tensor, expert: int) -> Tensor:
        """This rank's shard of the `weight` [rows, in] of an expert of the layer with ΔW in it, a new tensor."""
        place, start = expert - self._first, 0
        dtype = torch.promote_types(weight.dtype, torch.float32)
        with torch.no_grad():
            total = weight.detach().to(dtype, copy=True)
            for name, (rows, is_adapted) in self._rows.items():
                if is_adapted:
                    a, b = self.lora_A[name][place].to(dtype), self.lora_B[name][place].to(dtype)
                    total[start : start + rows] += self._scaling * (b @ a)
                start += rows
            return total.to(weight.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """For Megatron's checkpoints: the experts of all EP ranks along one axis, and what expert TP ranks cut."""
        mesh, axis = self._mesh, len(sharded_offsets)
        state = {}
        for name, parameter in self.named_parameters():
            offsets = [*sharded_offsets, (axis, mesh.ep_rank, mesh.ep)]
            is_cut = self._is_cut(name)
            if is_cut:
                offsets.append((axis + self._cut_axis, mesh.etp_rank, mesh.etp))
            replica = (0, 0 if is_cut else mesh.etp_rank, mesh.expert_dp_rank)
            state[f"{prefix}{name}"] = ShardedTensor.from_rank_offsets(
                f"{prefix}{name}", parameter, *offsets, replica_id=replica, prepend_axis_num=axis
            )
        return state

    def _mark(self) -> None:
        """As `build.py` marks the experts: their gradients are summed over the ranks that hold copies of them. A
        gradient norm counts every part, as EP ranks have others each, but once what is whole on expert TP ranks."""
        for name, parameter in self.named_parameters():
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
            parameter.partition_dim = self._cut_axis  # type: ignore[attr-defined]
            parameter.partition_stride = 1  # type: ignore[attr-defined]
            if not self._is_cut(name) and self._mesh.etp_rank > 0:
                parameter.shared = True  # type: ignore[attr-defined]

    def _is_cut(self, name: str) -> bool:
        """Whether expert TP ranks have parts of the parameter."""
        return name.startswith("lora_A." if self._is_row_parallel else "lora_B.")

    def _added(self, tokens: Tensor, tokens_per_expert: Tensor, stacks: Mapping[str, tuple[Tensor, Tensor]]) -> Tensor:
        """B · A · x [tokens, rows] of experts whose A and B are in `stacks`; 0 where a projection has no adapter."""
        parts = []
        for name, (rows, is_adapted) in self._rows.items():
            if not is_adapted:
                parts.append(tokens.new_zeros(len(tokens), rows))
                continue
            a, b = stacks[name]
            if self._is_row_parallel:
                b = copy_to_tensor_model_parallel_region(b, group=self._mesh.etp_group)
            else:
                a = copy_to_tensor_model_parallel_region(a, group=self._mesh.etp_group)
            low = grouped_product(tokens, a, tokens_per_expert)
            parts.append(grouped_product(low, b, tokens_per_expert))
        return torch.cat(parts, dim=-1)


def attach_to_experts(mlp: nn.Module, target: AdapterTarget, lora: LoraConfig, mesh: Mesh) -> None:
    """Puts the adapter into Megatron's MoE layer `mlp`, beside the experts, whose products it changes."""
    name = next(name for name in _LINEARS if target.linear.endswith(name))
    experts: Any = mlp.experts
    first: int = mlp.local_expert_indices[0]  # type: ignore[index,assignment]
    if isinstance(experts, GroupedExperts):
        parameter = name.rpartition(".")[2]
        adapter = ExpertsAdapter(target, lora, mesh, [getattr(experts, parameter)], first)
        experts.changes[parameter] = adapter.change
    else:
        linears = [getattr(expert, _LINEARS[name]) for expert in experts.local_experts]
        adapter = ExpertsAdapter(target, lora, mesh, [linear.weight for linear in linears], first)
        experts.register_forward_pre_hook(adapter.take_apart)
        experts.register_forward_hook(adapter.put_away)
        for place, linear in enumerate(linears):
            linear.register_forward_hook(partial(adapter.change_output, place))
    mlp.add_module(target.adapter.rpartition(".")[2], adapter)


def expert_adapters(model: nn.Module) -> Iterator[tuple[nn.Parameter, ExpertsAdapter]]:
    """(frozen parameter, its adapter) of all experts of a model, in Megatron's wrappers or not."""
    for module in model.modules():
        if isinstance(module, ExpertsAdapter):
            yield from ((weight, module) for weight in module.weights)
