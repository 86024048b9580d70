"""Section `rollout`: how responses are generated."""

from typing import Literal

from pydantic import Field

from megappo.config.base import Section


class RolloutConfig(Section):
    """The generation engine and the sampling of training responses."""

    engine: Literal["native"] = "native"
    """`native` decodes with a KV cache on the training shards themselves."""
    n: int = Field(1, ge=1)
    """Responses for each prompt."""
    temperature: float = Field(1.0, gt=0)
    """Divides the logits in sampling and in every log-prob of actor and reference."""
    stop: tuple[str, ...] = ()
    """Strings that end a response; the text keeps them."""
    ignore_eos: bool = False
    """Go on to `data.max_response_length` whatever is sampled (for benchmarks)."""
    max_num_seqs: int = Field(256, ge=1)
    """Sequences that a replica decodes at once."""
    max_num_batched_tokens: int = Field(8192, ge=1)
    """Prompt tokens of one prefill forward."""


class EvaluationSampling(Section):
    """How evaluation samples: greedy unless told."""

    n: int = Field(1, ge=1)
    """Responses for each prompt; `pass_at_k` is reported for k = n."""
    temperature: float = Field(0.0, ge=0)
    """0 is greedy."""
    top_k: int = Field(0, ge=0)
    """Sample from the k most probable tokens; 0 is off."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the most probable tokens that have this mass together; 1 is off."""
