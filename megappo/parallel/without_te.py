"""What Megatron-core needs where Transformer Engine is missing, on a CPU or a GPU."""

from typing import Any

from torch import Tensor

from megappo.parallel.patching import replace


def install() -> None:
    """Installs the replacements; imports megatron."""
    _define_missing_gemm()
    _keep_optimizer_steps_apart()
    _recompute_without_fp8()


def _define_missing_gemm() -> None:
    """megatron-core 0.16.1 compares `te_general_gemm` in the MoE router without having defined it: a NameError."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _keep_optimizer_steps_apart() -> None:
    """torch's AdamW keeps a `step` tensor a parameter; a checkpoint load gives all of them one and the same tensor.

    Every parameter would then count every other's steps. Seen with megatron-core 0.16.1 and 0.19.2, which expect Apex
    or TE optimizers that keep one number a group.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def set_states(self: Any, model_param: Any, tensors: dict[str, Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in state:
            state["step"] = state["step"].clone()
            tensors.setdefault("step", state["step"])
        original(self, model_param, tensors)

    replace(DistributedOptimizer, "_set_main_param_and_optimizer_states", set_states)


def _recompute_without_fp8() -> None:
    """Megatron's recompute of norms takes fp8 for switched on wherever it is not None, and then asks Transformer Engine
    about it, which was not imported: a NameError. Seen with megatron-core 0.16.1.
    """
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    original = CheckpointWithoutOutput.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.fp8 = False

    replace(CheckpointWithoutOutput, "__init__", init)
