"""Rules about low-rank adapters."""

from megappo.config.checks_adapter import adapter_problems
from megappo.config.experiment import ExperimentConfig
from megappo.config.lora import ALL_LINEAR, LoraConfig
from megappo.config.model_folder import ModelFolderError, read_model_facts
from megappo.config.problem import Problem, Severity, typed


def lora_problems(config: ExperimentConfig) -> list[Problem]:
    """Every error and warning about `model.lora` and `critic.lora`."""
    problems = []
    for path, lora in (("model.lora", config.model.lora), ("critic.lora", config.critic.lora)):
        problems += _role_problems(config, path, lora) if lora.is_used else _unused_problems(path, lora)
    return problems


def _role_problems(config: ExperimentConfig, path: str, lora: LoraConfig) -> list[Problem]:
    problems = []
    if path == "critic.lora" and not (config.trainer.kind == "ppo" and config.needs_critic):
        reason = "does nothing, for this run has no critic"
        problems.append(Problem(f"{path}.rank", typed(lora.rank), reason, "leave it out", Severity.WARNING))
    if lora.dropout > 0 and config.layout.tp > 1:
        reason = (
            f"ranks that share a layer would have to leave out the same inputs, and layout.tp is {config.layout.tp}"
        )
        problems.append(Problem(f"{path}.dropout", typed(lora.dropout), reason, "set it to 0, or layout.tp to 1"))
    if config.model.layers == "te":
        reason = f"Transformer Engine fuses norms into the layers that {path} adapts"
        problems.append(Problem("model.layers", '"te"', reason, "set it to torch or auto (then torch), or rank to 0"))
    folder = config.model.path if path == "model.lora" else config.critic.path or config.model.path
    # Other patterns can name experts too: those are refused where the adapters are made, which know the names.
    if ALL_LINEAR in lora.target_modules and _has_experts(folder):
        reason = f"{folder} has experts, whose adapters are plain: PEFT knows no others"
        remedy = "or name projections of the attention: target_modules: ['*.self_attn.*']"
        if lora.type == "dora":
            problems.append(Problem(f"{path}.type", typed(lora.type), reason, f"set it to lora, {remedy}"))
        if lora.dropout > 0:
            problems.append(Problem(f"{path}.dropout", typed(lora.dropout), reason, f"set it to 0, {remedy}"))
    if lora.adapter_path is not None:
        problems += adapter_problems(path, lora, lora.adapter_path)
        if path == "model.lora" and config.has_reference and config.ref.path is None:
            reason = "the reference is the model without adapters, and the run does not begin with it"
            if config.trainer.kind == "dpo":
                reason += ": the first loss is not that of equal policies"
            remedy = (
                "set ref.path to the merged model (megappo convert --merged, or PEFT's merge_and_unload) where the "
                "reference is to be the start"
            )
            problems.append(Problem(f"{path}.adapter_path", typed(lora.adapter_path), reason, remedy, Severity.WARNING))
    return problems


def _unused_problems(path: str, lora: LoraConfig) -> list[Problem]:
    fields = LoraConfig.model_fields
    changed = sorted(key for key in fields if key != "rank" and getattr(lora, key) != fields[key].default)
    if not changed:
        return []
    name = f"{path}.{changed[0]}"
    reason = f"does nothing, for {path}.rank is 0"
    value = typed(getattr(lora, changed[0]))
    return [Problem(name, value, reason, "set the rank, for example 16, or leave it out", Severity.WARNING)]


def _has_experts(folder: str) -> bool:
    try:
        return read_model_facts(folder).num_experts is not None
    except ModelFolderError:
        return False  # the layout's rules say so
