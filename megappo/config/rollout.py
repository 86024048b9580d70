"""Section `rollout`: how responses are generated."""

from typing import Literal

from pydantic import Field

from megappo.config.base import Section
from megappo.config.multi_turn import MultiTurnConfig


class RolloutConfig(Section):
    """The generation engine and the sampling of training responses."""

    engine: Literal["native", "vllm"] = "native"
    """`native` decodes with a KV cache on the training shards themselves; `vllm` in an engine of its own on the same
    ranks."""
    n: int = Field(1, ge=1)
    """Responses for each prompt."""
    temperature: float = Field(1.0, gt=0)
    """Divides the logits in sampling and in every log-prob of actor and reference."""
    top_k: int = Field(0, ge=0)
    """Sample training responses from the k most probable tokens; 0 is off. Needs
    `algorithm.rollout_correction.bypass_mode`."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample training responses from the most probable tokens that have this mass together; 1 is off. Needs
    `algorithm.rollout_correction.bypass_mode`."""
    stop: tuple[str, ...] = ()
    """Strings that end a response; the text keeps them."""
    ignore_eos: bool = False
    """Go on to `data.max_response_length` whatever is sampled (for benchmarks)."""
    max_num_seqs: int = Field(256, ge=1)
    """Sequences that a replica decodes at once."""
    max_num_batched_tokens: int = Field(8192, ge=1)
    """Prompt tokens of one prefill forward; with vLLM, all tokens of one forward."""
    pipeline_micro_batches: int | None = Field(None, ge=1)
    """Groups into which the native engine cuts the sequences of a step over `layout.pp` stages: while a stage computes
    one, the stage before it computes the next. null is `layout.pp`; 1 sends all sequences through in one piece."""
    tensor_model_parallel_size: int | None = Field(None, ge=1)
    """Ranks that generate together; null is `layout.tp`."""
    max_model_len: int | None = Field(None, ge=2)
    """vLLM's longest sequence, in tokens; null is `data.max_prompt_length` + `data.max_response_length`."""
    gpu_memory_utilization: float = Field(0.5, gt=0, le=1)
    """Share of a GPU's memory that vLLM fills with its weights and KV cache while it generates. On CPU the cache has
    VLLM_CPU_KVCACHE_SPACE GiB, 1 unless set."""
    free_cache_engine: bool = True
    """Give that memory back to training between generations (vLLM's sleep mode); false keeps it, and saves the time."""
    enforce_eager: bool = False
    """vLLM without CUDA graphs and compilation: starts in a quarter of the time and generates at half the speed."""
    enable_prefix_caching: bool = True
    """vLLM computes a common start of prompts once; the cache is emptied whenever weights change."""
    enable_chunked_prefill: bool = True
    """vLLM cuts long prompts to fit `max_num_batched_tokens`; false needs it to be at least `max_model_len`."""
    enable_expert_parallel: bool | None = None
    """vLLM keeps whole experts on a rank instead of a part of each; null is true on GPUs where `layout.ep` > 1. vLLM
    can't on CPU."""
    seed_per_request: bool = False
    """vLLM draws each response's noise from a generator of its own, so that what else is in the batch does not matter;
    a quarter slower on a GPU. False seeds each batch as a whole. The native engine always does the first."""
    quantization: Literal["fp8"] | None = None
    """vLLM generates with weights rounded to 8 bits; its log-probs then differ from the trainer's."""
    multi_turn: MultiTurnConfig = MultiTurnConfig()


class EvaluationSampling(Section):
    """How evaluation samples: greedy unless told."""

    n: int = Field(1, ge=1)
    """Responses for each prompt; `pass_at_k` is reported for k = n."""
    pass_at: tuple[int, ...] = ()
    """Further k, at most n: `pass_at_<k>`, estimated without bias from the n responses."""
    temperature: float = Field(0.0, ge=0)
    """0 is greedy."""
    top_k: int = Field(0, ge=0)
    """Sample from the k most probable tokens; 0 is off."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the most probable tokens that have this mass together; 1 is off."""
