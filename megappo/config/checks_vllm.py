"""Rules about vLLM's settings: sizes that it refuses when it starts, and settings that only it has."""

from megappo.config.experiment import ExperimentConfig
from megappo.config.problem import Problem, Severity, typed
from megappo.config.rollout import RolloutConfig

LEAST_TEMPERATURE = 0.01
"""vLLM takes smaller ones but 0 for this one (0.20.2, 0.32.0)."""

# Beside the first ones, which mean the same for every engine.
_OF_VLLM_ALONE = (
    "max_model_len", "gpu_memory_utilization", "free_cache_engine", "enforce_eager", "enable_prefix_caching",
    "enable_chunked_prefill", "enable_expert_parallel", "quantization",
)  # fmt: skip


def vllm_problems(config: ExperimentConfig) -> list[Problem]:
    """Of section `rollout`, for the engine that is chosen."""
    rollout = config.rollout
    if rollout.engine != "vllm":
        return _unused_settings(rollout)
    problems = []
    longest = rollout.max_model_len or config.max_length
    if longest < config.max_length:
        reason = (
            f"data.max_prompt_length {config.data.max_prompt_length} and data.max_response_length "
            f"{config.data.max_response_length} make {config.max_length} tokens"
        )
        problems.append(
            Problem("rollout.max_model_len", str(longest), reason, f"at least {config.max_length}, or null")
        )
    least, why = rollout.max_num_seqs, "a forward has a token of each of the max_num_seqs sequences"
    if not rollout.enable_chunked_prefill and longest > least:
        least, why = longest, "without enable_chunked_prefill, a forward has to hold the longest prompt"
    if rollout.max_num_batched_tokens < least:
        value = str(rollout.max_num_batched_tokens)
        problems.append(Problem("rollout.max_num_batched_tokens", value, why, f"at least {least}"))
    if rollout.quantization == "fp8" and config.model.dtype == "float32":
        remedy = "set model.dtype to bfloat16, or leave the quantization out"
        problems.append(Problem("rollout.quantization", '"fp8"', "vLLM can't with model.dtype float32", remedy))
    for path, temperature in (
        ("rollout.temperature", rollout.temperature),
        ("trainer.evaluation.temperature", config.trainer.evaluation.temperature),
    ):
        if 0 < temperature < LEAST_TEMPERATURE:
            reason = f"vLLM would sample at {LEAST_TEMPERATURE} instead"
            remedy = f"at least {LEAST_TEMPERATURE}, or rollout.engine native"
            problems.append(Problem(path, typed(temperature), reason, remedy))
    return problems


def _unused_settings(rollout: RolloutConfig) -> list[Problem]:
    """Warnings for what another engine does not read."""
    problems = []
    for name in _OF_VLLM_ALONE:
        value = getattr(rollout, name)
        if value != RolloutConfig.model_fields[name].default:
            reason, remedy = (
                f"does nothing, for rollout.engine is {rollout.engine}",
                "leave it out, or set that to vllm",
            )
            problems.append(Problem(f"rollout.{name}", typed(value), reason, remedy, Severity.WARNING))
    return problems
