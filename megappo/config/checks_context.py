"""Rules of context parallelism: what its two exchanges ask of the model and of the layers."""

from collections.abc import Iterator

from megappo.config.checks_layout import model_folders
from megappo.config.divisibility import choices, nearest
from megappo.config.experiment import ExperimentConfig
from megappo.config.model_folder import ModelFacts, ModelFolderError, read_model_facts
from megappo.config.problem import Problem, Severity, typed

EXCHANGE = "model.cp_comm_type"


def context_problems(config: ExperimentConfig) -> list[Problem]:
    """Of `layout.cp` and `model.cp_comm_type`. A folder that can't be read is told elsewhere."""
    model, cp = config.model, config.layout.cp
    if cp == 1:
        if model.cp_comm_type == "all_gather":
            return []
        reason = "does nothing, for layout.cp is 1"
        remedy = "leave it out, or set layout.cp to 2"
        return [Problem(EXCHANGE, model.cp_comm_type, reason, remedy, Severity.WARNING)]
    if model.cp_comm_type == "a2a":
        return list(_head_problems(config))
    if model.layers == "te" and model.use_remove_padding:
        reason = "Transformer Engine takes packed sequences (model.use_remove_padding) with an exchange of heads only"
        return [Problem(EXCHANGE, typed(model.cp_comm_type), reason, "a2a, or model.layers torch")]
    return []


def _head_problems(config: ExperimentConfig) -> Iterator[Problem]:
    """Models whose heads can't be exchanged: each of tp · cp ranks gets whole query heads and their whole KV heads."""
    tp, cp = config.layout.tp, config.layout.cp
    for folder in dict.fromkeys(folder for _, folder in model_folders(config)):
        try:
            facts = read_model_facts(folder)
        except ModelFolderError:
            continue
        if facts.heads_fit(tp * cp):
            continue
        reason = f"times tp {tp} = {tp * cp} does not divide the {heads_in_words(facts)} of {folder}, and "
        reason += f"{EXCHANGE} a2a gives whole ones to each rank"
        sizes = nearest(cp, 1, facts.num_kv_heads, lambda size, facts=facts: facts.heads_fit(tp * size))  # type: ignore[misc]
        remedy = f"set {EXCHANGE} to all_gather, which takes any cp"
        yield Problem("layout.cp", str(cp), reason, f"{choices(sizes)}, or {remedy}" if sizes else remedy)


def heads_in_words(facts: ModelFacts) -> str:
    return f"{facts.num_heads} attention heads ({facts.num_kv_heads} KV heads)"
