"""Requests that an engine can't answer: said before anything runs, in the user's terms."""

from collections.abc import Sequence

from megappo.engines.rollout import GenerationRequest, SamplingParams
from megappo.errors import ConfigError, DataError


def check_requests(
    requests: Sequence[GenerationRequest], sampling: SamplingParams, vocab_size: int, max_positions: int
) -> None:
    """ConfigError for sampling that can't be, DataError for a prompt that the model has no room or no token for."""
    _check_sampling(sampling)
    for number, request in enumerate(requests):
        prompt_length = len(request.prompt_ids)
        if prompt_length == 0:
            raise DataError(f"prompt {number} has no tokens; the model needs at least one to start from")
        max_tokens = request.max_tokens or sampling.max_tokens
        if prompt_length + max_tokens > max_positions:
            raise DataError(
                f"prompt {number} has {prompt_length} tokens, with max_tokens {max_tokens} over the model's "
                f"{max_positions} positions; at most {max(0, max_positions - max_tokens)} prompt tokens fit"
            )
        low, high = min(request.prompt_ids), max(request.prompt_ids)
        if low < 0 or high >= vocab_size:
            raise DataError(
                f"prompt {number} has token {low if low < 0 else high}, the model's vocabulary ends at "
                f"{vocab_size - 1}; use the tokenizer that belongs to the model"
            )


def _check_sampling(sampling: SamplingParams) -> None:
    limits = (
        ("max_tokens", sampling.max_tokens, sampling.max_tokens >= 1, "at least 1"),
        ("temperature", sampling.temperature, sampling.temperature >= 0, "0 (greedy) or more, for example 1.0"),
        ("top_k", sampling.top_k, sampling.top_k >= 0, "0 (off) or more"),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "over 0 and at most 1 (off)"),
        ("stop", sampling.stop, all(sampling.stop), "strings of at least one character"),
    )
    for name, value, is_valid, valid in limits:
        if not is_valid:
            raise ConfigError(f"sampling {name}: {value!r} can't be; it has to be {valid}")
