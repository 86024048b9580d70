"""Rules across sections that need no files and no machine, and `check_experiment`, which asks all rules.

Rules about the algorithm are in `checks_algorithm.py`, its settings that do nothing in `checks_idle.py`, those of parts
that a run does not have in `checks_unread.py`, about model folders, data files and the layout in `checks_layout.py`,
packed and dynamic micro-batches in `checks_packing.py`, the generation layout in `checks_hybrid.py`, context
parallelism in `checks_context.py`, vLLM's settings in `checks_vllm.py`, what is kept in memory in `checks_memory.py`,
parameters that ranks share in `checks_fsdp.py`, the optimizer in `checks_optim.py`, batch sizes in `divisibility.py`.
"""

from megappo.config.checks_algorithm import algorithm_problems
from megappo.config.checks_context import context_problems
from megappo.config.checks_experts import expert_problems
from megappo.config.checks_fsdp import fsdp_problems
from megappo.config.checks_hybrid import hybrid_problems
from megappo.config.checks_idle import idle_problems
from megappo.config.checks_layout import file_problems, layout_problems, world_problems
from megappo.config.checks_lora import lora_problems
from megappo.config.checks_memory import memory_problems
from megappo.config.checks_optim import optim_problems
from megappo.config.checks_packing import packing_problems
from megappo.config.checks_reward import reward_problems
from megappo.config.checks_sets import experience_problems, set_problems
from megappo.config.checks_unread import unread_problems
from megappo.config.checks_vllm import vllm_problems
from megappo.config.divisibility import divisibility_problems
from megappo.config.experiment import ExperimentConfig
from megappo.config.problem import Problem, Severity, raise_errors, typed


def check_evaluation(config: ExperimentConfig, world_size: int) -> list[Problem]:
    """The errors of an experiment that only answers its held-out prompts, on so many ranks: files, layout, generation
    and rewards. How a step is cut and what its training keeps in memory may not fit the ranks that evaluate."""
    dp = data_parallel_size(config, world_size)
    return [
        *reward_problems(config),
        *_data_problems(config),
        *set_problems(config),
        *file_problems(config),
        *layout_problems(config),
        *world_problems(config.layout, world_size),
        *hybrid_problems(config, dp),
        *context_problems(config),
        *vllm_problems(config),
    ]


def check_experiment(config: ExperimentConfig, world_size: int | None = None) -> list[Problem]:
    """Every error and warning of an experiment, errors first.

    `world_size` is the number of ranks where it is known; the data-parallel size then follows from it. Batch sizes are
    checked for the known dp, otherwise for 1: what does not divide there divides nowhere.
    """
    problems = [
        *_trainer_problems(config),
        *((*_ppo_problems(config), *algorithm_problems(config)) if config.trainer.kind == "ppo" else ()),
        *(_dpo_problems(config) if config.trainer.kind == "dpo" else ()),
        *packing_problems(config),
        *reward_problems(config),
        *_data_problems(config),
        *set_problems(config),
        *experience_problems(config),
        *file_problems(config),
        *layout_problems(config),
        *world_problems(config.layout, world_size),
        *hybrid_problems(config, data_parallel_size(config, world_size)),
        *context_problems(config),
        *vllm_problems(config),
        *expert_problems(config),
        *memory_problems(config),
        *fsdp_problems(config),
        *optim_problems(config),
        *lora_problems(config),
        *divisibility_problems(config, data_parallel_size(config, world_size) or 1),
    ]
    told = {problem.path for problem in problems}
    unread = unread_problems(config, data_parallel_size(config, world_size))
    problems += [problem for problem in unread if problem.path not in told]
    return sorted(problems, key=lambda problem: problem.severity is Severity.WARNING)


def require_sound(config: ExperimentConfig, world_size: int | None = None) -> None:
    """Raises ConfigError with every error of the experiment; warnings pass."""
    raise_errors(check_experiment(config, world_size))


def data_parallel_size(config: ExperimentConfig, world_size: int | None) -> int | None:
    """dp of the layout, else what the world size leaves for it, else None."""
    if config.layout.dp is not None:
        return config.layout.dp
    return None if world_size is None else max(world_size // config.layout.model_parallel_size, 1)


def warning(path: str, value: object, reason: str, remedy: str) -> Problem:
    return Problem(path, typed(value), reason, remedy, Severity.WARNING)


def _trainer_problems(config: ExperimentConfig) -> list[Problem]:
    trainer = config.trainer
    problems = []
    if trainer.total_steps is None and trainer.total_epochs is None:
        reason = "the length of the run is missing: neither it nor trainer.total_epochs is set"
        problems.append(Problem("trainer.total_steps", None, reason, "for example 100"))
    if trainer.test_freq and not config.data.has_val_files:
        reason = "does nothing, for data.val_files is empty"
        problems.append(warning("trainer.test_freq", trainer.test_freq, reason, "name files there, or set it to 0"))
    if trainer.kind == "sft" and config.data.val_files and config.reward is None:
        reason = "held-out prompts are answered and scored, and there is no reward to score them with"
        problems.append(
            warning("data.val_files", list(config.data.val_files), reason, "add reward.parts, or leave it out")
        )
    if trainer.evaluation.n > 1 and trainer.evaluation.temperature == 0:
        reason = "all responses to a prompt will be the same, for trainer.evaluation.temperature is 0"
        problems.append(warning("trainer.evaluation.n", trainer.evaluation.n, reason, "set a temperature, or n to 1"))
    for path, seed in (("trainer.seed", trainer.seed), ("data.seed", config.data.seed)):
        if seed >= 2**32:
            problems.append(Problem(path, typed(seed), "has to be less than 2^32", "for example 0"))
    for role, optim in (("actor", config.actor.optim), ("critic", config.critic.optim)):
        if not all(0 <= beta < 1 for beta in optim.betas):
            reason = "a decay rate has to be at least 0 and less than 1"
            problems.append(Problem(f"{role}.optim.betas", typed(list(optim.betas)), reason, "for example [0.9, 0.95]"))
        end = None if optim.lr_scheduler_type == "constant" else optim.lr_decay_steps
        if end is not None and optim.lr_warmup_steps >= end:
            reason = f"the rate would still rise when its decay has ended, after lr_decay_steps {end}"
            path = f"{role}.optim.lr_warmup_steps"
            problems.append(Problem(path, typed(optim.lr_warmup_steps), reason, f"at most {end - 1}"))
    return problems


def _ppo_problems(config: ExperimentConfig) -> list[Problem]:
    actor, algorithm = config.actor, config.algorithm
    problems = []
    if config.reward is None:
        remedy = "for example reward: {parts: [{name: correct, kind: exact_match}]}"
        problems.append(Problem("reward", None, "is missing, and trainer.kind ppo learns from it", remedy))
    if actor.use_kl_loss and algorithm.use_kl_in_reward:
        reason = "KL counts twice, in the loss and in the reward (algorithm.use_kl_in_reward)"
        problems.append(warning("actor.use_kl_loss", True, reason, "set one of the two to false if that is not meant"))
    if algorithm.kl_ctrl.type == "adaptive" and not algorithm.use_kl_in_reward:
        reason = "does nothing, for algorithm.use_kl_in_reward is false and the loss has a constant coefficient"
        problems.append(warning("algorithm.kl_ctrl.type", "adaptive", reason, "set use_kl_in_reward to true, or fixed"))
    if config.ref.path is not None and not config.needs_reference:
        reason = "the reference is never read: actor.use_kl_loss and algorithm.use_kl_in_reward are false"
        problems.append(warning("ref.path", config.ref.path, reason, "turn one of them on, or leave the path out"))
    return [*problems, *idle_problems(config)]


def _dpo_problems(config: ExperimentConfig) -> list[Problem]:
    if config.dpo.loss_type == "ipo" and config.dpo.label_smoothing > 0:
        reason = "is for the loss sigmoid, and dpo.loss_type is ipo"
        return [Problem("dpo.label_smoothing", typed(config.dpo.label_smoothing), reason, "set it to 0")]
    return []


def _data_problems(config: ExperimentConfig) -> list[Problem]:
    data = config.data
    problems = []
    if data.system_prompt is not None and data.apply_chat_template is False:
        reason = "needs a chat template, and data.apply_chat_template is false"
        problems.append(
            Problem("data.system_prompt", typed(data.system_prompt), reason, "set that to true, or leave this out")
        )
    if "{prompt}" not in data.prompt_template:
        reason = "has no place for the prompt"
        problems.append(
            Problem("data.prompt_template", typed(data.prompt_template), reason, 'for example "Q: {prompt}"')
        )
    return problems
