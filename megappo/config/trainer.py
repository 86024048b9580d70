"""Section `trainer`: the length of the run, what it saves, and when it evaluates."""

from typing import Literal

from pydantic import Field

from megappo.config.base import Section
from megappo.config.rollout import EvaluationSampling

BestMode = Literal["max", "min"]


class TrainerConfig(Section):
    """The loop around the algorithm."""

    kind: Literal["ppo", "sft", "reward_model", "dpo"] = "ppo"
    """Reinforcement learning, supervised fine-tuning on prompt-response pairs, or learning from preference pairs: a
    reward model, or a policy by direct preference optimisation."""
    run_dir: str = Field(min_length=1, examples=["runs/demo"])
    """Folder of everything that the run leaves."""
    total_steps: int | None = Field(None, ge=1)
    """Steps of the run; null derives them from `total_epochs`."""
    total_epochs: int | None = Field(None, ge=1)
    """Passes over the prompts; ignored where `total_steps` is set."""
    critic_warmup: int = Field(0, ge=0)
    """First steps of the run in which the critic alone is updated."""
    balance_batch: bool = True
    """Deal the sequences of each minibatch over the data-parallel ranks so that all have about the same work."""
    seed: int = Field(0, ge=0)
    """Seed of sampling and of every random choice but the order of prompts."""
    save_freq: int = Field(0, ge=0)
    """Steps between checkpoints; 0 saves only when stopped and at the end."""
    save_last: bool = True
    """Save a checkpoint after the last step."""
    max_checkpoints: int | None = Field(None, ge=1)
    """Keep this many newest checkpoints; null keeps all."""
    export_hf: bool = False
    """Write the actor (or the reward model) as a Hugging Face folder after the last step: `hf/step-NNNNNN`."""
    resume: Literal["auto", "never"] | str = "never"
    """`never` starts anew and refuses a run folder that holds checkpoints; `auto` goes on from the newest one where
    there is one; anything else is the path of a checkpoint. `--resume` prefers the run's own newest one to that."""
    test_freq: int = Field(0, ge=0)
    """Steps between evaluations; 0 evaluates only before the first and after the last step."""
    val_before_train: bool = True
    """Evaluate before the first step."""
    best_metric: str | None = None
    """Metric of the evaluation such as `eval/val/exact_match`: the checkpoint where it is best is saved, and kept
    beside the newest ones as `checkpoints/best`."""
    best_mode: BestMode | None = None
    """Whether the highest or the lowest is the best; null goes by the metric's name: `min` for a loss, KL, perplexity
    or error, `max` for all others."""
    evaluation: EvaluationSampling = EvaluationSampling()
    stop_grace_seconds: float = Field(600.0, gt=0)
    """Time for the ranks to finish their step and save after a SIGTERM, before they are killed."""
    num_threads: int = Field(1, ge=1)
    """CPU threads of a rank."""
    timeout_minutes: float = Field(30.0, gt=0)
    """A collective that waits longer ends the run."""
