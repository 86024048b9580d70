"""Rules about the generation layout and the switch to it."""

from megappo.config.checks_layout import model_parallel_problems
from megappo.config.experiment import ExperimentConfig
from megappo.config.grid import TrainingGrid, generation_problem
from megappo.config.hybrid import HybridConfig
from megappo.config.model_folder import ModelFolderError, read_model_facts
from megappo.config.problem import Problem, Severity, typed

SIZE = "rollout.tensor_model_parallel_size"


def hybrid_problems(config: ExperimentConfig, dp: int | None) -> list[Problem]:
    """`dp` is the data-parallel size where it is known; a size that depends on it is checked only then."""
    problems = _unused_settings(config)
    size = config.rollout.tensor_model_parallel_size
    if size is not None:
        problems += _grid_problems(config, size, dp) or _head_problems(config, size)
    return problems + _group_problems(config) + _expert_problems(config)


def _unused_settings(config: ExperimentConfig) -> list[Problem]:
    """Warnings for keys of `hybrid` that this run does not read."""
    hybrid, rollout, reasons = config.hybrid, config.rollout, {}
    if rollout.engine == "native":
        reasons["weights"] = "rollout.engine is native, which always takes the shards"
        if not config.generates_in_own_layout:
            reasons["bucket_mib"] = "the native engine decodes on the training shards where they lie"
    elif hybrid.weights == "load" or rollout.quantization is not None:
        reasons["bucket_mib"] = "weights are streamed through vLLM's loader, tensor by tensor"
    if config.trainer.kind != "ppo":
        reasons |= dict.fromkeys(("check_every", "check_limit"), f"trainer.kind {config.trainer.kind} checks no switch")
    problems = []
    for name, reason in reasons.items():
        value = getattr(hybrid, name)
        if value != HybridConfig.model_fields[name].default:
            reason, remedy = f"does nothing, for {reason}", "leave it out"
            problems.append(Problem(f"hybrid.{name}", typed(value), reason, remedy, Severity.WARNING))
    return problems


def _expert_problems(config: ExperimentConfig) -> list[Problem]:
    """Of whole experts spread over a replica of vLLM: a plan has as many of them on each rank."""
    rollout, path = config.rollout, "rollout.enable_expert_parallel"
    asked = rollout.enable_expert_parallel
    if rollout.engine != "vllm" or asked is False or (asked is None and config.layout.ep == 1):
        return []
    try:
        facts = read_model_facts(config.model.path)
    except ModelFolderError:
        return []  # the layout's rules say so
    size = config.generation_tp
    if facts.num_experts is None:
        return [Problem(path, "true", f"{config.model.path} has no experts", "leave it out")] if asked else []
    if facts.num_experts % size == 0:
        return []
    possible = ", ".join(str(each) for each in range(1, size) if facts.num_experts % each == 0 and facts.tp_fits(each))
    reason = f"{facts.num_experts} experts can't be spread evenly over the {size} ranks of a replica"
    if asked:
        return [Problem(path, "true", reason, f"false, or {SIZE} of {possible}")]
    reason += ", as they are on GPUs with layout.ep over 1"
    return [Problem(path, None, reason, f"false, or {SIZE} of {possible}", Severity.WARNING)]


def _group_problems(config: ExperimentConfig) -> list[Problem]:
    """Of the groups that follow each other through pipeline stages: for the engine that decodes through them."""
    count, rollout = config.rollout.pipeline_micro_batches, config.rollout
    if count is None:
        return []
    path, remedy = "rollout.pipeline_micro_batches", "leave it out"
    if rollout.engine == "vllm":
        reason = "cuts steps of the native engine, and rollout.engine is vllm, whose replicas have no stages"
        return [Problem(path, str(count), reason, remedy)]
    if count == 1:
        return []
    if config.generates_in_own_layout:
        reason = (
            "replicas in a layout of their own (rollout.tensor_model_parallel_size, layout.ep over 1) have no stages "
            "for groups to follow each other through"
        )
        return [Problem(path, str(count), reason, f"1, or {remedy}")]
    if config.layout.pp == 1:
        reason = "layout.pp is 1, so that there are no stages for groups to follow each other through"
        return [Problem(path, str(count), reason, f"1, or {remedy}")]
    if count > rollout.max_num_seqs:
        reason = f"each group needs a sequence, and rollout.max_num_seqs is {rollout.max_num_seqs}"
        return [Problem(path, str(count), reason, f"{rollout.max_num_seqs} or less")]
    return []


def _grid_problems(config: ExperimentConfig, size: int, dp: int | None) -> list[Problem]:
    layout = config.layout
    if dp is None and size > layout.tp:
        return []
    problem = generation_problem(TrainingGrid(tp=layout.tp, pp=layout.pp, dp=(dp or 1) * layout.cp), size)
    if problem is None:
        return []
    reason, _, sizes = problem.rpartition("; possible: ")
    return [Problem(SIZE, str(size), reason, f"possible: {sizes}")]


def _head_problems(config: ExperimentConfig, size: int) -> list[Problem]:
    try:
        facts = read_model_facts(config.model.path)
    except ModelFolderError:
        return []  # the layout's rules say so
    return model_parallel_problems(facts, config.model.path, size, 1, tp_path=SIZE)
