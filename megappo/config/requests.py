"""What the command line asks of the ranks: one frozen request a command, handed to their processes as JSON."""

from enum import Enum
from typing import Literal

from pydantic import Field

from megappo.config.base import Section
from megappo.config.experiment import ExperimentConfig
from megappo.config.layout import LayoutConfig
from megappo.config.layout_options import LAYOUT_OPTIONS
from megappo.config.rollout import EvaluationSampling

Dtype = Literal["float32", "bfloat16"]


class TrainRequest(Section):
    """Run an experiment; whether it resumes is in `config.trainer.resume`."""

    config: ExperimentConfig


class EvaluateRequest(Section):
    """Generate responses to the experiment's held-out prompts and score them."""

    config: ExperimentConfig
    model: str | None = None
    """Hugging Face folder or checkpoint of the policy; the newest checkpoint of the run when null."""
    layout_options: tuple[str, ...] = ()
    """Settings of section `layout` that were typed as options, under which messages name them."""


class ConvertRequest(Section):
    """Hugging Face folder → checkpoint, or checkpoint → Hugging Face folder; `source` says which by what it is."""

    source: str
    target: str
    layout: LayoutConfig = LayoutConfig()
    """Of the ranks that convert; what they write, any other layout can read."""
    dtype: Dtype | None = None
    """Type of the written weights; that of the read ones when null."""
    merged: bool = False
    """Write the whole model with its low-rank adapters in it, rather than the adapters alone."""
    base: str | None = None
    """Hugging Face folder with the weights under the adapters; null reads it where the run had it."""


class GenerateRequest(Section):
    """Generate responses to prompts."""

    model: str
    """Hugging Face folder or checkpoint."""
    base: str | None = None
    """As of `ConvertRequest`."""
    prompts: tuple[str, ...] = Field(min_length=1)
    sampling: EvaluationSampling = EvaluationSampling()
    max_tokens: int = Field(256, ge=1)
    """Tokens of a response at most."""
    seed: int = Field(0, ge=0, lt=2**32)
    layout: LayoutConfig = LayoutConfig()
    """Of the ranks that hold the model; data-parallel ranks are replicas, which share the prompts."""
    dtype: Dtype | None = None
    """Type of the weights while generating; that of the model when null."""
    apply_chat_template: bool | None = None
    """As in section `data`: null does it where the tokenizer has a template."""
    as_json: bool = False
    """Print one JSON object a response instead of its text."""


Request = TrainRequest | EvaluateRequest | ConvertRequest | GenerateRequest


def layout_options(request: Request) -> tuple[str, ...]:
    """The settings of section `layout` that the user of `request` knows as options."""
    match request:
        case TrainRequest():
            return ()
        case EvaluateRequest():
            return request.layout_options
        case ConvertRequest() | GenerateRequest():
            return LAYOUT_OPTIONS


class Command(Enum):
    """The commands that run on ranks, by the word that is typed."""

    TRAIN = "train"
    EVALUATE = "evaluate"
    CONVERT = "convert"
    GENERATE = "generate"

    @property
    def request(self) -> type[Request]:
        """The class of this command's request."""
        return REQUESTS[self]

    @classmethod
    def of(cls, request: Request) -> "Command":
        """The command that a request belongs to."""
        return next(command for command, kind in REQUESTS.items() if isinstance(request, kind))


REQUESTS: dict[Command, type[Request]] = {
    Command.TRAIN: TrainRequest,
    Command.EVALUATE: EvaluateRequest,
    Command.CONVERT: ConvertRequest,
    Command.GENERATE: GenerateRequest,
}
