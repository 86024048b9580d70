"""What a model family is: its shape from a Hugging Face configuration, and its weight map. Imports no torch.

One file a family beside this one; `families/__init__.py` lists them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from megappo.config.model_folder import default_kv_heads
from megappo.errors import ConfigError
from megappo.models.weight_map import Head, WeightMap

HFConfig = Mapping[str, Any]
"""The contents of a `config.json`."""


Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Llama 3.1's frequency scaling: long wavelengths are stretched by `factor`, short ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class MoeShape:
    """The experts of a decoder: `top_k` of `num_experts` routed ones for a token, and a shared one for all tokens."""

    num_experts: int
    top_k: int
    ffn_size: int
    """Feed-forward rows of one routed expert."""
    shared_ffn_size: int = 0
    """Feed-forward rows of the shared expert (of all of them together, where there are several); 0 is none."""
    has_shared_gate: bool = False
    """The shared expert's output is multiplied by a sigmoid of its own."""
    norm_topk_prob: bool = False
    """The weights of a token's chosen experts are divided by their sum."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """What makes an expert's score of its logit."""
    scaling: float = 1.0
    """The weights are multiplied with it."""
    num_groups: int = 1
    """Neighbouring experts form so many groups, of which a token uses only the best `top_groups`."""
    top_groups: int = 1
    best_of_group: int = 1
    """So many of its highest scores make a group's score."""
    has_bias: bool = False
    """A number for each expert is added to its score where experts are chosen, but not in their weights."""
    dense_layers: frozenset[int] = frozenset()
    """Layers without experts, counted over the model from 0; `ModelShape.ffn_size` is theirs."""


@dataclass(frozen=True)
class YarnRopeScaling:
    """YaRN (arXiv 2309.00071) as DeepSeek uses it: frequencies between the two betas are ramped, and attention is
    sharpened by the mscales."""

    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float


@dataclass(frozen=True)
class LatentShape:
    """Multi-head latent attention (DeepSeek-V2): queries, keys and values go through a low rank.

    A part of each head, `rope_head_dim` wide, carries the positions. `ModelShape.head_dim` is the width of a query
    head, both parts.
    """

    q_rank: int | None
    """None: queries are projected directly."""
    kv_rank: int
    rope_head_dim: int
    value_head_dim: int
    yarn: YarnRopeScaling | None = None


@dataclass(frozen=True)
class ModelShape:
    """All sizes and switches of a decoder that Megatron and the weight map need; counts, no units."""

    num_layers: int
    hidden_size: int
    ffn_size: int
    """Feed-forward rows of a layer without experts."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3RopeScaling | None
    tied: bool
    """Input embedding and output layer are one tensor."""
    qkv_bias: bool = False
    qk_norm: bool = False
    moe: MoeShape | None = None
    """None for a dense model."""
    latent: LatentShape | None = None
    """None for grouped-query attention."""
    activation: Activation = "silu"
    """Of the gate in feed-forward parts."""
    rotary_percent: float = 1.0
    """The part of each head, from its first element on, that RoPE turns."""
    rotary_interleaved: bool = False
    """RoPE turns elements 2 i and 2 i + 1 together instead of i and i + half."""
    local_layers: frozenset[int] = frozenset()
    """Layers, counted over the model from 0, that `window` and `local_rope_theta` are for."""
    window: int | None = None
    """Keys that a query of a local layer sees, its own the last; None where it is no less than `max_positions`."""
    local_rope_theta: float | None = None
    """None: local layers have the RoPE of the others."""
    softmax_scale: float | None = None
    """What attention scores are multiplied with; None is 1 / sqrt(head_dim)."""
    attention_softcap: float | None = None
    """c: attention scores s become c · tanh(s / c)."""
    logit_softcap: float | None = None
    """The same for vocabulary logits."""
    embedding_scale: float | None = None
    """What embeddings are multiplied with, rounded to their type before."""
    zero_centered_norms: bool = False
    """Every RMSNorm multiplies with 1 + weight."""
    residual_norms: bool = False
    """What attention and feed-forward part add to the residual stream goes through a norm of its own."""

    @property
    def queries_per_group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def needs_torch_layers(self) -> bool:
        """Whether something is computed in megappo's torch layers alone."""
        switches = (self.window, self.attention_softcap, self.zero_centered_norms, self.residual_norms)
        return any(map(bool, switches))


class Family(Protocol):
    """One model family: how its configuration and its tensors are named."""

    @property
    def model_type(self) -> str:
        """`model_type` in config.json."""
        ...

    @property
    def value_architecture(self) -> str:
        """Hugging Face class of a model of this family with a one-number head."""
        ...

    def shape(self, config: HFConfig) -> ModelShape:
        """Reads config.json; ConfigError for a setting that is not supported."""
        ...

    def weight_map(self, shape: ModelShape, head: Head) -> WeightMap:
        """Which Hugging Face rows make each Megatron parameter, with the given head."""
        ...


def required(config: HFConfig, key: str) -> Any:
    """`config[key]`; ConfigError where it is missing or null."""
    value = config.get(key)
    if value is None:
        raise ConfigError(f"config.json: {key} is missing; a {config.get('model_type')} model needs it")
    return value


def refuse_unless(config: HFConfig, key: str, supported: Any) -> None:
    """ConfigError where `config[key]` is set to something else than the one supported value."""
    value = config.get(key)
    if value is not None and value != supported:
        raise ConfigError(
            f"config.json: {key} is {value!r}, which megappo's {config.get('model_type')} layers do not compute; "
            f"supported: {supported!r}"
        )


def rope_kind(rope: HFConfig) -> str:
    """The kind of scaling in `rope_parameters` or `rope_scaling`."""
    return str(rope.get("rope_type") or rope.get("type") or "default")


def rope_keys(config: HFConfig) -> HFConfig:
    """`rope_parameters` (transformers 5) or `rope_scaling` (before). ConfigError where both are there and differ: which
    of them counts, and whether theta does, depends on the reader (transformers 5.19 takes `rope_scaling`, alone)."""
    parameters, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    told = {key: value for key, value in scaling.items() if key not in ("type", "rope_type")}
    same = rope_kind(parameters) == rope_kind(scaling) and all(parameters.get(key) == told[key] for key in told)
    if parameters and scaling and not same:
        raise ConfigError(
            "config.json: rope_parameters and rope_scaling are both there and differ; move what rope_scaling has into "
            "rope_parameters, beside rope_theta, and take it out"
        )
    return parameters or scaling


def read_theta(config: HFConfig, default: float = 10000.0) -> float:
    """`rope_theta`, among the keys of RoPE or beside them."""
    return float(rope_keys(config).get("rope_theta") or config.get("rope_theta") or default)


def read_rope(config: HFConfig) -> tuple[float, Llama3RopeScaling | None]:
    """(theta, scaling) from `rope_parameters`, or `rope_theta` and `rope_scaling`."""
    scaling, theta = rope_keys(config), read_theta(config)
    kind = rope_kind(scaling)
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ConfigError(f"config.json: RoPE scaling {kind!r} is not supported; supported: 'default', 'llama3'")
    return theta, Llama3RopeScaling(
        factor=float(required(scaling, "factor")),
        low_freq_factor=float(required(scaling, "low_freq_factor")),
        high_freq_factor=float(required(scaling, "high_freq_factor")),
        original_max_positions=int(required(scaling, "original_max_position_embeddings")),
    )


def window_of(config: HFConfig) -> int | None:
    """`sliding_window` of config.json where it hides anything: None where a query sees all `max_position_embeddings`.

    Raises ConfigError where it is no size.
    """
    window = config.get("sliding_window")
    if window is None:
        return None
    if int(window) < 1:
        raise ConfigError(f"config.json: sliding_window is {window}; it has to be at least 1, or null for none")
    return int(window) if int(window) < int(required(config, "max_position_embeddings")) else None


def read_rotary_percent(config: HFConfig, default: float) -> float:
    """`partial_rotary_factor`, among the keys of RoPE or beside them."""
    percent = rope_keys(config).get("partial_rotary_factor", config.get("partial_rotary_factor"))
    return default if percent is None else float(percent)


def read_shape(config: HFConfig, *, qkv_bias: bool, qk_norm: bool, default_tied: bool) -> ModelShape:
    """The shape from the keys that all families share."""
    refuse_unless(config, "hidden_act", "silu")
    num_heads, hidden_size = int(required(config, "num_attention_heads")), int(required(config, "hidden_size"))
    num_kv_heads = int(config.get("num_key_value_heads") or default_kv_heads(config, num_heads))
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
        )
    tied = config.get("tie_word_embeddings")
    theta, scaling = read_rope(config)
    return ModelShape(
        num_layers=int(required(config, "num_hidden_layers")),
        hidden_size=hidden_size,
        ffn_size=int(required(config, "intermediate_size")),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=int(config.get("head_dim") or hidden_size // num_heads),
        vocab_size=int(required(config, "vocab_size")),
        max_positions=int(required(config, "max_position_embeddings")),
        norm_eps=float(required(config, "rms_norm_eps")),
        rope_theta=theta,
        rope_scaling=scaling,
        tied=default_tied if tied is None else bool(tied),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
    )
