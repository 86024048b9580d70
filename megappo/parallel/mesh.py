"""The rank grid: Megatron's groups for a layout, and this rank's place in them. Collectives are in `collectives.py`."""

import megappo.parallel.runtime as runtime  # isort: skip  before megatron

import math
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor
from torch.distributed import ProcessGroup

from megappo.config.grid import TrainingGrid
from megappo.config.layout import LayoutConfig, sequence_alignment
from megappo.config.pipeline import EVEN, PipelineSplit
from megappo.errors import ConfigError
from megappo.parallel.gpus import take_gpu
from megappo.parallel.groups import own_group
from megappo.parallel.meeting import meeting_store


@dataclass(frozen=True)
class Mesh:
    """This rank's place in the grid `[pp, dp, cp, tp]` of all ranks, and the groups along its axes.

    A group is a slice of the grid: `tp_group` varies the last index, `cp_group` the one before, `dp_group` the second,
    `pp_group` the first; `model_parallel_group` is the slice of one dp and cp index, the ranks that hold one copy of
    the model together, and `sequence_group` that of one dp index, the ranks that work on the same sequences.

    The experts of a stage are laid over the same ranks as a grid `[expert dp, ep, etp]` (`TrainingGrid` has the ranks):
    `etp_group` cuts each expert, `ep_group` shares the experts, `expert_dp_group` holds copies of the same ones.
    """

    tp: int
    pp: int
    dp: int
    sequence_parallel: bool
    rank: int
    world_size: int
    tp_rank: int
    pp_rank: int
    dp_rank: int
    device: torch.device
    tp_group: ProcessGroup
    pp_group: ProcessGroup
    dp_group: ProcessGroup
    model_parallel_group: ProcessGroup
    ep: int
    etp: int
    ep_rank: int
    etp_rank: int
    expert_dp_rank: int
    ep_group: ProcessGroup
    etp_group: ProcessGroup
    expert_dp_group: ProcessGroup
    cp: int
    cp_rank: int
    cp_group: ProcessGroup
    sequence_group: ProcessGroup
    split: PipelineSplit = EVEN
    vpp: int = 1
    """Virtual stages of each pipeline rank: model chunks that it holds."""

    def stage_layers(self, num_layers: int) -> list[int]:
        """Layers of each pipeline stage of a model with so many; of pp · vpp where there are virtual ones, of which the
        stage s lies on pipeline rank s mod pp."""
        number = self.pp * self.vpp
        stages = self.split.stages(num_layers, number)
        assert stages is not None, f"{num_layers} layers don't fit {number} stages: checked when a model is built"
        return stages

    @property
    def training_grid(self) -> TrainingGrid:
        """The same grid as arithmetic on ranks, without groups."""
        return TrainingGrid(tp=self.tp, pp=self.pp, dp=self.dp * self.cp, ep=self.ep, etp=self.etp)

    @property
    def copy_rank(self) -> int:
        """Which copy of the dense weights this rank holds a shard of."""
        return self.dp_rank * self.cp + self.cp_rank

    @property
    def world_group(self) -> ProcessGroup:
        """All ranks."""
        group = dist.group.WORLD
        assert group is not None, "the mesh was stopped"
        return group

    @property
    def grid(self) -> Tensor:
        """[pp, dp, cp, tp] int64: global ranks."""
        return rank_grid(self.tp, self.pp, self.dp, self.cp)

    @property
    def dp_peers(self) -> list[int]:
        """Global ranks of `dp_group`, by data-parallel rank, ascending."""
        peers: list[int] = self.grid[self.pp_rank, :, self.cp_rank, self.tp_rank].tolist()
        return peers

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1

    @property
    def first_stage_rank(self) -> int:
        """Global rank of the first stage in this rank's pipeline."""
        return int(self.grid[0, self.dp_rank, self.cp_rank, self.tp_rank])

    @property
    def last_stage_rank(self) -> int:
        """Global rank of the last stage in this rank's pipeline."""
        return int(self.grid[-1, self.dp_rank, self.cp_rank, self.tp_rank])

    @property
    def group_leader(self) -> int:
        """Global rank of the first rank that works on this rank's sequences."""
        return int(self.grid[0, self.dp_rank, 0, 0])

    @property
    def is_group_leader(self) -> bool:
        return self.rank == self.group_leader

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes what only one rank of the world writes."""
        return self.rank == 0

    @property
    def sequence_alignment(self) -> int:
        """Padded sequence lengths are multiples of this."""
        return sequence_alignment(self.tp, self.cp, self.sequence_parallel)

    def __str__(self) -> str:
        """The grid, one line a pipeline stage, one bracket a TP group; this rank is starred."""
        width = len(str(self.world_size - 1))
        experts = f", experts: ep {self.ep} × etp {self.etp}" if self.ep * self.etp > 1 else ""
        virtual = f", {self.vpp} virtual stages on each" if self.vpp > 1 else ""
        copies = f"dp {self.dp}" if self.cp == 1 else f"dp {self.dp} × cp {self.cp}"
        lines = [f"{self.world_size} ranks = pp {self.pp} × {copies} × tp {self.tp}{virtual}{experts}"]
        for stage, rows in enumerate(self.grid.flatten(1, 2).tolist()):
            groups = []
            for row in rows:
                ranks = [f"{rank:>{width}}{'*' if rank == self.rank else ' '}" for rank in row]
                groups.append("[" + " ".join(ranks).rstrip(" ") + "]")
            lines.append(f"stage {stage}: " + "  ".join(groups))
        return "\n".join(lines)


def rank_grid(tp: int, pp: int, dp: int, cp: int = 1) -> Tensor:
    """[pp, dp, cp, tp] int64: the global rank at each place, TP neighbours next to each other (Megatron's order)."""
    return torch.arange(pp * dp * cp * tp).reshape(pp, dp, cp, tp)


def data_parallel_size(layout: LayoutConfig, world_size: int) -> int:
    """The data-parallel size that fills `world_size` ranks; ConfigError where none does."""
    model = layout.model_parallel_size
    if world_size % model:
        valid = [size for size in (world_size // model * model, (world_size // model + 1) * model) if size > 0]
        raise ConfigError(
            f"layout: {layout.product('×')} = {model} ranks a model copy do not divide the {world_size} "
            f"ranks that were started; start {' or '.join(map(str, valid))} ranks"
        )
    dp = world_size // model
    if layout.dp is not None and layout.dp != dp:
        raise ConfigError(
            f"layout.dp: {layout.dp} needs {layout.product('×')} × dp {layout.dp} = {model * layout.dp} "
            f"ranks, but {world_size} were started; set layout.dp={dp} or leave it out"
        )
    experts = layout.ep * layout.expert_tp
    stage = layout.tp * layout.cp * dp
    if stage % experts:
        valid = [size for size in range(1, stage + 1) if stage % (size * layout.expert_tp) == 0]
        context = f"cp {layout.cp} × " if layout.cp > 1 else ""
        raise ConfigError(
            f"layout.ep: {layout.ep} × etp {layout.expert_tp} = {experts} ranks a copy of the experts do not divide "
            f"the tp {layout.tp} × {context}dp {dp} ranks of a pipeline stage; possible with this etp: "
            f"{', '.join(map(str, valid)) or 'none, leave layout.etp out'}"
        )
    return dp


def start_mesh(layout: LayoutConfig, *, seed: int, timeout: timedelta) -> Mesh:
    """Joins the world that torchrun's variables name (one rank alone without them), and builds Megatron's groups.

    `seed` seeds torch on this rank, and Megatron's tracker with a stream of its own for each TP rank. A collective that
    waits longer than `timeout` raises. Raises ConfigError where the layout does not fit the number of ranks.
    """
    if layout.sequence_parallel and layout.tp == 1:
        raise ConfigError(
            "layout.sequence_parallel: true needs tp > 1, there is nothing to shard over; set it to false"
        )
    if layout.vpp > 1 and layout.pp == 1:
        raise ConfigError(
            f"layout.vpp: {layout.vpp} is for virtual stages of a pipeline; set layout.pp to 2, or it to 1"
        )
    data_parallel_size(layout, int(os.environ.get("WORLD_SIZE", "1")))
    _join_process_group(timeout)
    dp = data_parallel_size(layout, dist.get_world_size())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
        distributed_timeout_minutes=math.ceil(timeout.total_seconds() / 60),
        create_gloo_process_groups=False,
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    model_parallel_group = parallel_state.get_model_parallel_group()
    grid = rank_grid(layout.tp, layout.pp, dp, layout.cp)
    sequence_groups = [grid[:, number].flatten().tolist() for number in range(dp)]
    mesh = Mesh(
        tp=layout.tp,
        pp=layout.pp,
        dp=dp,
        sequence_parallel=layout.sequence_parallel,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        device=runtime.device(),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        pp_group=parallel_state.get_pipeline_model_parallel_group(),
        dp_group=parallel_state.get_data_parallel_group(),
        model_parallel_group=model_parallel_group,
        ep=layout.ep,
        etp=layout.expert_tp,
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        etp_rank=parallel_state.get_expert_tensor_parallel_rank(),
        expert_dp_rank=parallel_state.get_expert_data_parallel_rank(),
        ep_group=parallel_state.get_expert_model_parallel_group(),
        etp_group=parallel_state.get_expert_tensor_parallel_group(),
        expert_dp_group=parallel_state.get_expert_data_parallel_group(),
        cp=layout.cp,
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_group=parallel_state.get_context_parallel_group(),
        sequence_group=model_parallel_group if layout.cp == 1 else own_group(sequence_groups),
        split=layout.split,
        vpp=layout.vpp,
    )
    _check_groups(mesh)
    return mesh


def stop_mesh() -> None:
    """Leaves all groups; does nothing where there are none (vLLM's shutdown may have destroyed the default group)."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _join_process_group(timeout: timedelta) -> None:
    if dist.is_initialized():
        return
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(name, value)
    backend = "gloo" if runtime.on_cpu else "cpu:gloo,cuda:nccl"
    if not runtime.on_cpu:
        take_gpu()
    store = meeting_store(timeout)
    if store is None:
        dist.init_process_group(backend, timeout=timeout)
    else:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _check_groups(mesh: Mesh) -> None:
    """Megatron's groups are the slices of the grid that `Mesh` says they are."""
    grid, pp, dp, cp, tp = mesh.grid, mesh.pp_rank, mesh.dp_rank, mesh.cp_rank, mesh.tp_rank
    slices = {
        "tp": (mesh.tp_group, grid[pp, dp, cp, :]),
        "cp": (mesh.cp_group, grid[pp, dp, :, tp]),
        "dp": (mesh.dp_group, grid[pp, :, cp, tp]),
        "pp": (mesh.pp_group, grid[:, dp, cp, tp]),
        "model-parallel": (mesh.model_parallel_group, grid[:, dp, cp, :].flatten()),
    }
    for name, (group, expected) in slices.items():
        ranks = dist.get_process_group_ranks(group)
        assert ranks == expected.tolist(), f"Megatron's {name} group is {ranks}, the rank grid says {expected.tolist()}"
    _check_expert_groups(mesh)


def _check_expert_groups(mesh: Mesh) -> None:
    """Megatron's ranks and groups are those that `TrainingGrid` computes."""
    grid, rank = mesh.training_grid, mesh.rank
    places = (mesh.pp_rank, mesh.copy_rank, mesh.tp_rank, mesh.expert_dp_rank, mesh.ep_rank, mesh.etp_rank)
    computed = (
        grid.stage(rank), grid.dp_rank(rank), grid.tp_rank(rank), grid.expert_dp_rank(rank), grid.ep_rank(rank),
        grid.etp_rank(rank),
    )  # fmt: skip
    assert places == computed, f"Megatron says that this rank stands at {places}, the training grid says {computed}"
    stage, copy, ep, etp = mesh.pp_rank, mesh.expert_dp_rank, mesh.ep_rank, mesh.etp_rank
    slices = {
        "expert TP": (mesh.etp_group, [grid.expert_rank(stage, copy, ep, place) for place in range(mesh.etp)]),
        "EP": (mesh.ep_group, [grid.expert_rank(stage, copy, place, etp) for place in range(mesh.ep)]),
        "expert DP": (
            mesh.expert_dp_group,
            [grid.expert_rank(stage, place, ep, etp) for place in range(grid.stage_size // (mesh.ep * mesh.etp))],
        ),
    }
    for name, (group, expected) in slices.items():
        ranks = dist.get_process_group_ranks(group)
        assert ranks == expected, f"Megatron's {name} group is {ranks}, the training grid says {expected}"
