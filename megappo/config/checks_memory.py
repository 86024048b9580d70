"""Rules about what is kept in memory: recompute of activations, and offload between phases."""

from typing import Literal

from megappo.config.divisibility import choices, nearest
from megappo.config.experiment import ExperimentConfig
from megappo.config.model_folder import ModelFacts, ModelFolderError, read_model_facts
from megappo.config.problem import Problem, Severity, typed


def missing_role(config: ExperimentConfig, role: Literal["critic", "ref"]) -> str | None:
    """Why the run has no such model, so that settings of its memory do nothing; None where it has one."""
    if role == "critic":
        has_critic = config.trainer.kind == "ppo" and config.needs_critic
        return None if has_critic else "this run has no critic"
    if not config.has_reference:
        return "this run has no reference"
    return "the reference is the actor without its adapters" if config.reference_is_actor else None


def memory_problems(config: ExperimentConfig) -> list[Problem]:
    """Settings of recompute that don't go together, or don't fit the model; and of offload, engine or roles."""
    return [*_recompute_problems(config), *_recompute_model_problems(config), *_offload_problems(config)]


def _recompute_problems(config: ExperimentConfig) -> list[Problem]:
    model = config.model
    granularity = model.recompute_granularity
    of_full = {"recompute_method": model.recompute_method, "recompute_num_layers": model.recompute_num_layers}
    problems = []
    if granularity == "full":
        remedies = {"recompute_method": "uniform or block", "recompute_num_layers": "for example 1"}
        problems += [
            Problem(f"model.{name}", None, "is missing, and model.recompute_granularity full needs it", remedies[name])
            for name, value in of_full.items()
            if value is None
        ]
    else:
        reason = f"is for full recompute, and model.recompute_granularity is {granularity or 'null'}"
        problems += [
            Problem(f"model.{name}", typed(value), reason, "set that to full, or leave this out")
            for name, value in of_full.items()
            if value is not None
        ]
    if granularity != "selective" and model.recompute_modules is not None:
        reason = f"is for selective recompute, and model.recompute_granularity is {granularity or 'null'}"
        modules = typed(list(model.recompute_modules))
        problems.append(Problem("model.recompute_modules", modules, reason, "set that to selective, or leave this out"))
    if granularity == "selective" and model.recompute_modules == ():
        reason = "names no module, and nothing would be recomputed"
        problems.append(Problem("model.recompute_modules", "[]", reason, "for example [core_attn]"))
    return problems


def _recompute_model_problems(config: ExperimentConfig) -> list[Problem]:
    folders = [config.model.path]
    if config.trainer.kind == "ppo" and config.needs_critic and config.critic.path is not None:
        folders.append(config.critic.path)
    problems = []
    for folder in dict.fromkeys(folders):
        try:
            facts = read_model_facts(folder)
        except ModelFolderError:
            continue  # told where the layout is checked
        if config.model.recompute_granularity == "full":
            problems += _number_problems(config, folder, facts)
        if config.model.recompute_granularity == "selective" and facts.num_experts is None:
            problems += _absent_modules(config, folder, facts)
    return problems


def _number_problems(config: ExperimentConfig, folder: str, facts: ModelFacts) -> list[Problem]:
    number = config.model.recompute_num_layers
    stages = config.layout.split.stages(facts.num_layers, config.layout.num_stages)
    if number is None or stages is None:
        return []
    most = max(stages)
    is_uniform = config.model.recompute_method == "uniform"

    def fits(size: int) -> bool:
        return all(layers % size == 0 for layers in stages) if is_uniform else size <= most

    if fits(number):
        return []
    layers = " or ".join(map(str, sorted(set(stages)))) if is_uniform else most
    reason = f"{'does not divide' if is_uniform else 'is more than'} the {layers} layers of a stage of {folder}"
    remedy = choices(nearest(number, 1, most, fits))
    return [Problem("model.recompute_num_layers", str(number), reason, remedy)]


def _absent_modules(config: ExperimentConfig, folder: str, facts: ModelFacts) -> list[Problem]:
    """Modules that the layers of a dense model have not got; others are found when it is built."""
    reason = f"is a part of layers with experts, and {folder} is dense ({facts.model_type})"
    return [
        Problem(f"model.recompute_modules.{place}", module, reason, "mlp is the part of its layers")
        for place, module in enumerate(config.model.recompute.modules)
        if module in ("moe", "shared_experts")
    ]


def _offload_problems(config: ExperimentConfig) -> list[Problem]:
    problems = []
    if config.actor.offload.params and config.rollout.engine == "vllm" and config.hybrid.weights != "load":
        reason = (
            f"vLLM computes on the actor's own memory (hybrid.weights {config.hybrid.weights}), and its CUDA graphs "
            "keep addresses that parameters lose when they are moved"
        )
        remedy = "set hybrid.weights to load, or offload grads and optimizer alone"
        problems.append(Problem("actor.offload.params", "true", reason, remedy))
    roles: tuple[Literal["critic", "ref"], ...] = ("critic", "ref")
    for role in roles:
        missing = missing_role(config, role)
        for name, is_set in getattr(config, role).offload.model_dump().items():
            if is_set and missing is not None:
                path, reason = f"{role}.offload.{name}", f"does nothing, for {missing}"
                problems.append(Problem(path, "true", reason, "leave it out", Severity.WARNING))
    return problems
