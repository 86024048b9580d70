"""Which metrics the evaluation of an experiment will have, before anything is measured."""

from collections.abc import Sequence

from megappo.config.data_names import source_name
from megappo.config.experiment import ExperimentConfig
from megappo.config.reward import RULES, RewardPartConfig
from megappo.config.trainer import BestMode, TrainerConfig

OF_PAIRS = ("accuracy", "margin", "loss")
"""What `trainer/pair_evaluation.py` measures."""

BEST_LOW = {"loss", "losses", "nll", "kl", "ppl", "perplexity", "error", "errors"}
"""Words in a measure's name that say that less of it is better."""


def best_mode(trainer: TrainerConfig) -> BestMode:
    """Which values of `trainer.best_metric` are the best: as set, else by the name of what is measured."""
    if trainer.best_mode is not None:
        return trainer.best_mode
    measure = (trainer.best_metric or "").rpartition("/")[2]
    return "min" if BEST_LOW & set(measure.split("_")) else "max"


def evaluation_metrics(config: ExperimentConfig) -> list[str]:
    """`eval/<data set>/<measure>` for each held-out file and prompt set; empty where nothing is evaluated."""
    files = [source_name(file) for file in config.data.val_files]
    if measures_pairs(config):
        return [f"eval/{file}/{measure}" for file in files for measure in OF_PAIRS]
    if config.reward is None:
        return []
    parts = config.reward.parts
    measures = {file: _of_answers(config, parts) for file in files}
    for one in config.data.sets:
        if one.val_files:
            own = [part for part in parts if not one.reward or part.name in one.reward]
            measures[one.name] = _of_answers(config, own)
    return [f"eval/{name}/{measure}" for name, found in measures.items() for measure in found]


def measures_pairs(config: ExperimentConfig) -> bool:
    """Whether held-out rows are preference pairs, not prompts to answer."""
    kind = config.trainer.kind
    return kind == "reward_model" or (kind == "dpo" and config.reward is None)


def _of_answers(config: ExperimentConfig, parts: Sequence[RewardPartConfig]) -> list[str]:
    """What `trainer/evaluate.py` measures of answers that these parts score."""
    measures = ["reward", "response_length"]
    if any(part.kind in RULES for part in parts):
        at = (f"pass_at_{k}" for k in config.trainer.evaluation.pass_at)
        measures += ["exact_match", "pass_at_k", *at]
    return measures
