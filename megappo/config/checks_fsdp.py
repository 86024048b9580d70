"""Rules about parameters that data-parallel ranks share: what they don't go together with, and the way out."""

from collections.abc import Iterator

from megappo.config.checks_memory import missing_role
from megappo.config.experiment import ExperimentConfig
from megappo.config.fsdp import RefFsdpConfig
from megappo.config.lora import LoraConfig
from megappo.config.model_folder import ModelFolderError, read_model_facts
from megappo.config.offload import RefOffloadConfig
from megappo.config.problem import Problem, Severity, typed


def fsdp_problems(config: ExperimentConfig) -> list[Problem]:
    """Every error and warning about `….fsdp`."""
    roles = list(_roles(config))
    problems = [problem for role in roles for problem in _unused_problems(*role)]
    for name, fsdp, offload, folder, missing in roles:
        if fsdp.enable and missing is None:
            problems += _role_problems(config, f"{name}.fsdp.enable", name, offload)
            problems += _expert_problems(f"{name}.fsdp.enable", folder)
    if config.actor.fsdp.enable:
        problems += _generation_problems(config)
    return problems


Role = tuple[str, RefFsdpConfig, RefOffloadConfig, str, str | None]


def _roles(config: ExperimentConfig) -> Iterator[Role]:
    """Name, settings, model folder of each role, and why the run has no such model; None where it has."""
    path = config.model.path
    yield "actor", config.actor.fsdp, config.actor.offload, path, None
    critic, ref = config.critic, config.ref
    yield "critic", critic.fsdp, critic.offload, critic.path or path, missing_role(config, "critic")
    yield "ref", ref.fsdp, ref.offload, ref.path or path, missing_role(config, "ref")


def _unused_problems(name: str, fsdp: RefFsdpConfig, _: object, __: str, missing: str | None) -> list[Problem]:
    fields = type(fsdp).model_fields
    changed = sorted(key for key in fields if key != "enable" and getattr(fsdp, key) != fields[key].default)
    if fsdp.enable and missing is not None:
        reason = f"does nothing, for {missing}"
        return [Problem(f"{name}.fsdp.enable", "true", reason, "leave it out", Severity.WARNING)]
    if not fsdp.enable and changed:
        key = f"{name}.fsdp.{changed[0]}"
        reason = f"does nothing, for {name}.fsdp.enable is false"
        value = typed(getattr(fsdp, changed[0]))
        return [Problem(key, value, reason, "set that to true, or leave this out", Severity.WARNING)]
    return []


def _role_problems(config: ExperimentConfig, path: str, name: str, offload: RefOffloadConfig) -> list[Problem]:
    other = "leave it out" if name == "ref" else f"set it to false, and {name}.optim.use_distributed_optimizer to true"
    problems = []
    if config.layout.pp > 1:
        reason = f"parameters are cut on one pipeline stage alone, and layout.pp is {config.layout.pp}"
        problems.append(Problem(path, "true", reason, f"set layout.pp to 1 (layout.tp cuts layers too), or {other}"))
    if config.layout.cp > 1:
        reason = f"parameters are cut over data-parallel ranks alone, and layout.cp is {config.layout.cp}"
        problems.append(Problem(path, "true", reason, f"set layout.cp to 1, or {other}"))
    setting, lora = _adapters(config, name)
    if lora is not None and lora.is_used:
        reason = f"frozen weights with adapters are not cut, and {setting}.rank is {lora.rank}"
        remedy = "adapters need no gradients and moments of the rest: leave it out, or set the rank to 0"
        problems.append(Problem(path, "true", reason, remedy))
    moved = [kind for kind, is_set in offload.model_dump().items() if is_set]
    if moved:
        reason = f"what is cut stays on the device, and {name}.offload.{moved[0]} is true"
        problems.append(Problem(path, "true", reason, f"leave one of them out; without cutting, {other}"))
    return problems


def _adapters(config: ExperimentConfig, name: str) -> tuple[str, LoraConfig | None]:
    """The section of the role's adapters; a reference's model has none."""
    if name == "ref":
        return "", None
    return ("critic.lora", config.critic.lora) if name == "critic" else ("model.lora", config.model.lora)


def _expert_problems(path: str, folder: str) -> list[Problem]:
    try:
        facts = read_model_facts(folder)
    except ModelFolderError:
        return []  # the layout's rules say so
    if facts.num_experts is not None:
        reason = f"models with experts are not cut, and {folder} has {facts.num_experts} of them a layer"
        return [Problem(path, "true", reason, "leave it out; layout.ep shares the experts over data-parallel ranks")]
    return []


def _generation_problems(config: ExperimentConfig) -> list[Problem]:
    path = "actor.fsdp.enable"
    if config.rollout.engine == "vllm" and config.hybrid.weights != "load":
        reason = (
            f"vLLM would compute on the actor's own memory (hybrid.weights {config.hybrid.weights}), which is given up "
            "when training has its turn"
        )
        return [Problem(path, "true", reason, "set hybrid.weights to load, or cut critic and reference alone")]
    return []
