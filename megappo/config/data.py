"""Section `data`: prompts, templates, lengths and order."""

from typing import Literal

from pydantic import Field

from megappo.config.base import Section


class PromptSetConfig(Section):
    """One of several prompt sets that are mixed. What it leaves null is as in section `data`."""

    name: str = Field(min_length=1, examples=["sums"])
    """Name in the metrics: `reward/sets/<name>`, `eval/<name>/…`."""
    files: tuple[str, ...] = Field(min_length=1, examples=["[data/sums.jsonl]"])
    """As `data.train_files`."""
    val_files: tuple[str, ...] = ()
    """Held-out prompts: one data set of the evaluation together, scored by the set's reward."""
    weight: float = Field(1.0, gt=0)
    """Share of the prompts, in proportion to the other sets' weights."""
    reward: tuple[str, ...] = ()
    """Names of the reward parts that score this set's responses; all of them where empty."""
    prompt_key: str | None = None
    """Column of the prompt."""
    answer_key: str | None = None
    """Column of the ground truth."""
    prompt_template: str | None = None
    """Wraps a string prompt before the chat template."""
    system_prompt: str | None = None
    """First message of the chat."""
    apply_chat_template: bool | None = None
    """Render prompts with the tokenizer's chat template."""


class DataConfig(Section):
    """Where prompts come from and how they become token ids."""

    train_files: tuple[str, ...] = Field((), examples=["[data/train.jsonl]"])
    """JSONL or Parquet files, data set folders saved by `datasets`, or `hub:NAME[:CONFIG][@SPLIT]`; empty where `sets`
    has them."""
    sets: tuple[PromptSetConfig, ...] = ()
    """Several prompt sets, mixed in proportion to their weights, each with its own template, reward and evaluation."""
    val_files: tuple[str, ...] = ()
    """Held-out prompts, each file a data set of the evaluation named by its stem, scored by all parts of `reward`."""
    prompt_key: str = "prompt"
    """Column of the prompt: a string, or a list of chat messages."""
    answer_key: str | None = "answer"
    """Column of the ground truth that rule rewards compare with; null where there is none."""
    response_key: str = "response"
    """Column of the target text of supervised training."""
    chosen_key: str = "chosen"
    """Column of a preference pair's better response: a string, or chat messages."""
    rejected_key: str = "rejected"
    """Column of its worse response."""
    apply_chat_template: bool | None = None
    """Render prompts with the tokenizer's chat template; null does it where the tokenizer has one."""
    system_prompt: str | None = None
    """First message of the chat; needs a chat template."""
    prompt_template: str = "{prompt}"
    """Wraps a string prompt before the chat template."""
    train_batch_size: int = Field(ge=1, examples=[128])
    """Prompts of one step (sequences for supervised training, pairs for preferences)."""
    max_prompt_length: int = Field(ge=1, examples=[512])
    """Tokens, chat template included."""
    max_response_length: int = Field(ge=1, examples=[512])
    """Tokens, end-of-sequence included."""
    overlong_prompts: Literal["error", "left", "right", "filter"] = "error"
    """What happens to a longer prompt: stop, cut its start (`left`) or its end (`right`), or leave it out."""
    shuffle: bool = True
    """Take the prompts of an epoch in random order, another one each epoch."""
    seed: int = Field(0, ge=0)
    """Seed of the order of prompts."""
    max_samples: int | None = Field(None, ge=1)
    """Use only the first prompts of each training file."""
    max_val_samples: int | None = Field(None, ge=1)
    """Use only the first prompts of each held-out file."""
    prefetch: bool = False
    """Keep prompts as text, and make the token ids of a step's prompts while the step before computes: a tenth of the
    memory, for large data sets."""

    @property
    def has_val_files(self) -> bool:
        """Whether there is anything to evaluate on."""
        return bool(self.val_files) or any(one.val_files for one in self.sets)
