"""Section `reward`: the named parts whose weighted sum is a sequence's score."""

from typing import Literal

from pydantic import Field

from megappo.config.base import Section

RULES = ("exact_match", "gsm8k", "math_verify")
"""Kinds that compare with an answer, and say right (1) or wrong (0) rather than how good."""


class RewardPartConfig(Section):
    """One part of the score."""

    name: str = Field(min_length=1, examples=["correct"])
    """Name in the metrics: `reward/parts/<name>`."""
    kind: Literal["exact_match", "gsm8k", "math_verify", "answer_line", "function", "http", "model", "implicit"]
    """A rule by its name, a function of your own, a service behind HTTP, a reward model, or the implicit reward of a
    policy that learned from preferences."""
    function: str | None = None
    """`module:function` for kind `function`: takes a sample, returns a float, one float a response token, or a
    Reward."""
    weight: float = 1.0
    """Factor of this part in the score."""
    evaluation_only: bool = False
    """Measure responses to held-out prompts with this part, and leave it out of training."""
    url: str | None = None
    """Address of kind `http`, which gets a POST of a JSON batch: docs/rewards.md."""
    token_env: str | None = None
    """Environment variable of kind `http` whose content is sent as a bearer token."""
    batch_size: int = Field(16, ge=1)
    """Samples of one request of kind `http`."""
    max_concurrent: int = Field(8, ge=1)
    """Requests of kind `http` under way at once, on each data-parallel rank."""
    retries: int = Field(2, ge=0)
    """Further attempts of a request of kind `http` that got no answer, or one that asks to come back."""
    path: str | None = None
    """Kind `model`: a Hugging Face folder of a sequence classifier with one label, or a checkpoint of
    `trainer.kind: reward_model`."""
    tokenizer_path: str | None = None
    """Folder of the reward model's tokenizer; its own folder when null."""
    apply_chat_template: bool | None = None
    """Whether kind `model` reads the conversation through its tokenizer's chat template; null does where it has one."""
    micro_batch_size_per_gpu: int = Field(8, ge=1)
    """Sequences of one forward of the kinds `model` and `implicit`."""
    policy: str | None = None
    """Kind `implicit`: Hugging Face folder or checkpoint of the policy that `trainer.kind: dpo` left."""
    reference: str | None = None
    """Kind `implicit`: the policy that DPO started from; `model.path` when null."""
    beta: float = Field(0.1, gt=0)
    """Kind `implicit`: the reward of a response token is β · (log π_policy − log π_reference); DPO's own β is
    `dpo.beta`."""
    at_end: bool = False
    """Kind `implicit`: give the sum of a response's token rewards once, at its last token."""


class OverlongBufferConfig(Section):
    """A penalty that grows over the last tokens of the response's limit (DAPO, arXiv 2503.14476)."""

    enable: bool = False
    """Take the penalty off the score."""
    len: int = Field(1, ge=1)
    """Tokens before `data.max_response_length` over which it grows."""
    penalty_factor: float = Field(1.0, ge=0)
    """The penalty of a response as long as the limit."""


class RewardConfig(Section):
    """The reward of a response."""

    parts: tuple[RewardPartConfig, ...] = Field(min_length=1, examples=["[{name: correct, kind: exact_match}]"])
    timeout_seconds: float = Field(30.0, gt=0)
    """A part that takes longer for one sample counts as failed."""
    failed_score: float = 0.0
    """Score of a part that raised or timed out."""
    max_failed_fraction: float = Field(0.5, ge=0, le=1)
    """Stop the run when more of a step's samples than this fraction failed."""
    normalize: Literal["none", "scale", "standard"] = "none"
    """Divide scores by their standard deviation over the run so far (`scale`), or also take their mean off
    (`standard`)."""
    clip_range: tuple[float, float] | None = None
    """Lowest and highest score, after normalisation."""
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()

    @property
    def training_parts(self) -> tuple[RewardPartConfig, ...]:
        """The parts that training learns from."""
        return tuple(part for part in self.parts if not part.evaluation_only)
