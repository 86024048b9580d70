"""Section `data`: prompts, templates, lengths and order."""

from typing import Literal

from pydantic import Field

from megappo.config.base import Section


class DataConfig(Section):
    """Where prompts come from and how they become token ids."""

    train_files: tuple[str, ...] = Field(min_length=1, examples=["[data/train.jsonl]"])
    """JSONL or Parquet files, data set folders saved by `datasets`, or `hub:NAME[:CONFIG][@SPLIT]`."""
    val_files: tuple[str, ...] = ()
    """Held-out prompts, each file a data set of the evaluation named by its stem."""
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
