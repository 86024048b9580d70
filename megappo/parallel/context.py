"""Context-parallel ranks: the cut of micro-batches over them, with the group that gathers their results."""

from functools import partial

from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from megappo.experience.context import WHOLE, ContextCut
from megappo.parallel.mesh import Mesh


def context_cut(mesh: Mesh) -> ContextCut:
    """How this rank's context-parallel group shares the tokens of a micro-batch."""
    if mesh.cp == 1:
        return WHOLE
    # Megatron's gather for sequence parallelism, over another group: without the flag the gradient is cut, not summed.
    gather = partial(gather_from_sequence_parallel_region, tensor_parallel_output_grad=False, group=mesh.cp_group)
    return ContextCut(mesh.cp, mesh.cp_rank, gather)
