"""Requests into a vLLM engine, and completions out of it, step by step."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy
import torch

from megappo.config.checks_vllm import LEAST_TEMPERATURE
from megappo.engines.rollout import Completion, GenerationRequest, Progress, SamplingParams
from megappo.errors import ConfigError

if TYPE_CHECKING:
    from megappo.engines.vllm.experts import ExpertStore


def check_sampling(sampling: SamplingParams, has_tokenizer: bool) -> None:
    """ConfigError for sampling that this engine would not do as it says."""
    if 0 < sampling.temperature < LEAST_TEMPERATURE:
        raise ConfigError(
            f"sampling temperature: {sampling.temperature!r} is below {LEAST_TEMPERATURE}, the least that vLLM samples "
            "at; set it to 0 (greedy), or to that"
        )
    if sampling.stop and not has_tokenizer:
        raise ConfigError(
            f"sampling stop: {list(sampling.stop)!r} needs vLLM's tokenizer, which is loaded where rollout.stop is "
            "set; set it there"
        )


def generate(
    engine: Any,
    requests: Sequence[GenerationRequest],
    sampling: SamplingParams,
    eos_ids: Sequence[int],
    decode: Callable[[Sequence[int]], str],
    progress: Progress | None,
    *,
    seed_per_request: bool,
    experts: "ExpertStore | None" = None,
) -> list[Completion]:
    """Completions in the order of the requests, from a vLLM `LLMEngine` without any others.

    With `seed_per_request` each has noise of its own, from its key; otherwise the keys together seed the generators of
    this process, which the caller puts back. With `experts`, completions have `routed_experts`, but not those that
    requests are told of: a replica agrees on them at the end.
    """
    if not seed_per_request and requests:
        keys = [request.noise_key for request in requests]
        torch.manual_seed(int(numpy.random.SeedSequence(keys).generate_state(1)[0]))
    completions: dict[int, Completion] = {}
    engine_ids: list[str] = []
    try:
        for index, request in enumerate(requests):
            prompt = {"prompt_token_ids": list(request.prompt_ids)}
            limited = replace(sampling, max_tokens=request.max_tokens or sampling.max_tokens)
            parameters = vllm_sampling(limited, request.noise_key if seed_per_request else None, eos_ids)
            engine_ids.append(engine.add_request(str(index), prompt, parameters))
        while engine.has_unfinished_requests():
            finished = [output for output in engine.step() if output.finished]
            new = {int(output.request_id): completion(output, decode) for output in finished}
            completions |= new
            for index, done in new.items():
                requests[index].tell(done)
            if finished and progress is not None:
                progress(len(completions), len(requests))
    finally:
        if len(completions) < len(requests):  # after an error: the next call must not find them
            engine.abort_request(engine_ids, internal=True)
            if experts is not None:
                experts.forget()
    ordered = [completions[index] for index in range(len(requests))]
    return ordered if experts is None else experts.completed(engine_ids, requests, ordered)


def vllm_sampling(sampling: SamplingParams, seed: int | None, eos_ids: Sequence[int]) -> Any:
    """vLLM's parameters of one request. End tokens are ours, not those that vLLM finds in the model's folder."""
    import vllm
    from vllm.sampling_params import RequestOutputKind

    return vllm.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=seed,
        max_tokens=sampling.max_tokens,
        stop=list(sampling.stop),
        stop_token_ids=sorted({*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_ids)}),
        ignore_eos=True,
        logprobs=0,  # of the sampled token alone
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def completion(output: Any, decode: Callable[[Sequence[int]], str]) -> Completion:
    """From vLLM's output of a finished request. Raises FloatingPointError where the model computed no numbers."""
    (response,) = output.outputs
    assert response.finish_reason in ("stop", "length"), f"vLLM ended a request with {response.finish_reason!r}"
    token_ids = tuple(response.token_ids)
    log_probs = tuple(at[token_id].logprob for at, token_id in zip(response.logprobs, token_ids, strict=True))
    if not all(map(isfinite, log_probs)):
        raise FloatingPointError(
            f"the model's logits for request {output.request_id} are not finite: its weights are broken"
        )
    return Completion(token_ids, log_probs, decode(token_ids), response.finish_reason)
