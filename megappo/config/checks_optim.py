"""Rules about the optimizer's communication and the types of its states: what needs what, and the way out."""

from collections.abc import Iterator

from megappo.config.checks_idle import idle_schedule_problems
from megappo.config.experiment import ExperimentConfig
from megappo.config.optim import OptimConfig
from megappo.config.problem import Problem, Severity, typed

_TYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_OF_WHOLE_PARAMETERS = (
    "overlap_grad_reduce", "overlap_param_gather", "grad_reduce_in_fp32", "use_precision_aware_optimizer"
)  # fmt: skip
_UNUSED_IF_CUT = ("use_distributed_optimizer", "align_param_gather", "bucket_size")


def optim_problems(config: ExperimentConfig) -> list[Problem]:
    """Every error and warning about overlapped communication, precision of gradients and states."""
    problems: list[Problem] = []
    has_critic = config.trainer.kind == "ppo" and config.needs_critic
    for role, section, is_cut, is_built in (
        ("actor", config.actor.optim, config.actor.fsdp.enable, True),
        ("critic", config.critic.optim, config.critic.fsdp.enable, has_critic),
    ):
        if not is_built:
            continue
        name = f"{role}.optim"
        problems += _cut_problems(section, name, role) if is_cut else _overlap_problems(section, name, config)
        problems += [*_precision_problems(section, name, config), *idle_schedule_problems(section, name)]
    return problems


def _cut_problems(optim: OptimConfig, name: str, role: str) -> Iterator[Problem]:
    for setting in _OF_WHOLE_PARAMETERS:
        value = getattr(optim, setting)
        if value != OptimConfig.model_fields[setting].default:
            reason = f"is for whole parameters, and those of {role}.fsdp.enable are cut"
            remedy = f"leave it out, or set {role}.fsdp.enable to false"
            yield Problem(f"{name}.{setting}", typed(value), reason, remedy)
    for setting in _UNUSED_IF_CUT:
        value = getattr(optim, setting)
        if value != OptimConfig.model_fields[setting].default:
            reason = f"does nothing, for the parameters of {role}.fsdp.enable are cut"
            yield Problem(f"{name}.{setting}", typed(value), reason, "leave it out", Severity.WARNING)


def _overlap_problems(optim: OptimConfig, name: str, config: ExperimentConfig) -> Iterator[Problem]:
    gather = f"{name}.overlap_param_gather"
    if optim.overlap_param_gather and not optim.use_distributed_optimizer:
        reason = f"every rank steps all parameters, for {name}.use_distributed_optimizer is false"
        yield Problem(gather, "true", reason, "set that to true, or this to false")
    if optim.overlap_param_gather and not optim.overlap_grad_reduce:
        reason = f"parameters are gathered in the buckets of gradients, and {name}.overlap_grad_reduce is false"
        yield Problem(gather, "true", reason, "set that to true too")
    if optim.align_param_gather:
        path = f"{name}.align_param_gather"
        if not optim.overlap_param_gather:
            reason = "says when parameters begin to be gathered, and overlap_param_gather is false"
            yield Problem(path, "true", reason, "set that to true, or this to false")
        elif config.layout.vpp == 1:
            reason = "Megatron aligns the chunks of virtual stages alone, and layout.vpp is 1"
            yield Problem(path, "true", reason, "set it to false, or layout.vpp to 2")
    if optim.bucket_size is not None and not optim.overlap_grad_reduce:
        reason = "does nothing, for without overlap_grad_reduce all gradients are one bucket"
        path = f"{name}.bucket_size"
        yield Problem(path, typed(optim.bucket_size), reason, "set that to true, or leave this out", Severity.WARNING)


def _precision_problems(optim: OptimConfig, name: str, config: ExperimentConfig) -> Iterator[Problem]:
    aware = f"{name}.use_precision_aware_optimizer"
    if not optim.use_precision_aware_optimizer:
        for setting in _TYPES:
            if getattr(optim, setting) != "float32":
                reason = "without use_precision_aware_optimizer it is float32"
                remedy = "set that to true, or leave this out"
                yield Problem(f"{name}.{setting}", getattr(optim, setting), reason, remedy)
        return
    if not optim.use_distributed_optimizer:
        reason = f"Megatron has it in its distributed optimizer, and {name}.use_distributed_optimizer is false"
        yield Problem(aware, "true", reason, "set that to true, or this to false")
    if config.model.dtype != "bfloat16":
        reason = f"the optimizer's own types stand beside bfloat16 parameters, and model.dtype is {config.model.dtype}"
        yield Problem(aware, "true", reason, "set model.dtype to bfloat16, or this to false")
    if (optim.main_grads_dtype == "float32") != optim.grad_reduce_in_fp32:
        reason = f"it is the type of reduced gradients, and grad_reduce_in_fp32 is {typed(optim.grad_reduce_in_fp32)}"
        remedy = "set that to false for bfloat16 gradients, or to true for float32 ones"
        yield Problem(f"{name}.main_grads_dtype", optim.main_grads_dtype, reason, remedy)
