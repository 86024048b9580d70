"""The weight map of a pre-norm decoder, which all families share; they differ in switches of the shape and in parts of
a layer.

Imports no torch. The names on the left are Megatron's, those on the right Hugging Face's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megappo.models.families.base import ModelShape
from megappo.models.weight_map import Block, Head, Rule, Segment, Shape, WeightMap

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
OUTPUT = "lm_head.weight"
SCORE = "score.weight"


@dataclass(frozen=True)
class LayerPart:
    """The attention or the feed-forward part of one layer: its Hugging Face tensors, and the rules that use them."""

    tensors: dict[str, Shape]
    rules: tuple[Rule, ...]

    def __add__(self, other: "LayerPart") -> "LayerPart":
        return LayerPart(self.tensors | other.tensors, self.rules + other.rules)


def grouped_attention(shape: ModelShape, layer: int) -> LayerPart:
    """Attention with grouped KV heads, q, k and v fused; with biases and q/k norms where the shape has them."""
    ours, theirs = f"decoder.layers.{layer}.self_attention.", f"model.layers.{layer}.self_attn."
    query_rows, kv_rows = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    tensors: dict[str, Shape] = {}
    for name, length in (("q", query_rows), ("k", kv_rows), ("v", kv_rows)):
        tensors[f"{theirs}{name}_proj.weight"] = (length, shape.hidden_size)
        if shape.qkv_bias:
            tensors[f"{theirs}{name}_proj.bias"] = (length,)
    rules = [
        Rule((f"{ours}linear_qkv.weight",), 0, (_fused_qkv(shape, theirs, "weight"),)),
        Rule((f"{ours}linear_proj.weight",), 1, ((Segment(f"{theirs}o_proj.weight", 0, query_rows),),)),
    ]
    if shape.qkv_bias:
        rules.append(Rule((f"{ours}linear_qkv.bias",), 0, (_fused_qkv(shape, theirs, "bias"),)))
    if shape.qk_norm:
        for name in ("q", "k"):
            source = f"{theirs}{name}_norm.weight"
            tensors[source] = (shape.head_dim,)
            rules.append(whole(f"{ours}{name}_layernorm.weight", source=source, length=shape.head_dim))
    tensors[f"{theirs}o_proj.weight"] = (shape.hidden_size, query_rows)
    return LayerPart(tensors, tuple(rules))


def dense_mlp(
    shape: ModelShape, layer: int, *, ours: str = "mlp", theirs: str = "mlp", ffn_size: int | None = None
) -> LayerPart:
    """A gated feed-forward part that every token goes through, of `shape.ffn_size` unless given."""
    ffn = shape.ffn_size if ffn_size is None else ffn_size
    gate, up, down = (f"model.layers.{layer}.{theirs}.{name}_proj.weight" for name in ("gate", "up", "down"))
    linear = f"decoder.layers.{layer}.{ours}.linear"
    rules = (
        Rule((f"{linear}_fc1.weight",), 0, ((Segment(gate, 0, ffn),), (Segment(up, 0, ffn),))),
        Rule((f"{linear}_fc2.weight",), 1, ((Segment(down, 0, ffn),),)),
    )
    rows = (ffn, shape.hidden_size)
    return LayerPart({gate: rows, up: rows, down: (shape.hidden_size, ffn)}, rules)


def stored_together(part: LayerPart, names: Sequence[str], name: str) -> LayerPart:
    """The part with its tensors `names` as row blocks, in this order, of one tensor `name`."""
    tensors = {each: shape for each, shape in part.tensors.items() if each not in names}
    rows, starts = 0, {}
    for each in names:
        starts[each] = rows
        rows += part.tensors[each][0]
    tensors[name] = (rows, *part.tensors[names[0]][1:])

    def moved(segment: Segment) -> Segment:
        if segment.source not in starts:
            return segment
        return Segment(name, starts[segment.source] + segment.start, segment.length)

    rules = [replace(rule, blocks=tuple(tuple(map(moved, block)) for block in rule.blocks)) for rule in part.rules]
    return LayerPart(tensors, tuple(rules))


def fused_qkv_attention(shape: ModelShape, layer: int) -> LayerPart:
    """`grouped_attention` whose q, k and v rows are one tensor in Hugging Face's model too (Phi-3)."""
    prefix = f"model.layers.{layer}.self_attn."
    names = [f"{prefix}{name}_proj.weight" for name in ("q", "k", "v")]
    return stored_together(grouped_attention(shape, layer), names, f"{prefix}qkv_proj.weight")


def fused_gate_up_mlp(shape: ModelShape, layer: int) -> LayerPart:
    """`dense_mlp` whose gate and up rows are one tensor in Hugging Face's model too (Phi-3, GLM-4)."""
    prefix = f"model.layers.{layer}.mlp."
    names = [f"{prefix}{name}_proj.weight" for name in ("gate", "up")]
    return stored_together(dense_mlp(shape, layer), names, f"{prefix}gate_up_proj.weight")


Part = Callable[[ModelShape, int], LayerPart]
"""From the shape and the number of a layer to that layer's attention or feed-forward part."""


@dataclass(frozen=True)
class NormNames:
    """Hugging Face's names of a layer's norms; None where the layer has none."""

    before_attention: str = "input_layernorm"
    after_attention: str | None = None
    """Of what attention adds to the residual stream."""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str | None = None
    """Of what the feed-forward part adds to the residual stream."""


PRE_NORMS = NormNames()
"""One before each part, as in Llama."""


def decoder_weight_map(
    shape: ModelShape,
    head: Head,
    *,
    attention: Part = grouped_attention,
    mlp: Part = dense_mlp,
    norms: NormNames = PRE_NORMS,
) -> WeightMap:
    """Embedding, layers, final norm and head. A value model has its own head and is never tied."""
    tensors: dict[str, Shape] = {EMBEDDING: (shape.vocab_size, shape.hidden_size)}
    rules = [_vocabulary_rule("embedding.word_embeddings.weight", EMBEDDING, shape)]
    for layer in range(shape.num_layers):
        part = (
            _norm(shape, layer, "input_layernorm", "self_attention.linear_qkv", norms.before_attention)
            + attention(shape, layer)
            + _residual_norm(shape, layer, "self_attn_bda", norms.after_attention)
            + _norm(shape, layer, "pre_mlp_layernorm", "mlp.linear_fc1", norms.before_mlp)
            + mlp(shape, layer)
            + _residual_norm(shape, layer, "mlp_bda", norms.after_mlp)
        )
        tensors |= part.tensors
        rules += part.rules
    tensors[FINAL_NORM] = (shape.hidden_size,)
    rules.append(whole("decoder.final_layernorm.weight", source=FINAL_NORM, length=shape.hidden_size))
    if head == "value":
        tensors[SCORE] = (1, shape.hidden_size)
        rules.append(whole("output_layer.weight", source=SCORE, length=1, is_optional=True))
    elif shape.tied:
        # Only the last of several pipeline stages has this parameter, its own copy of the embedding.
        rules.append(_vocabulary_rule("output_layer.weight", EMBEDDING, shape, is_copy=True))
    else:
        tensors[OUTPUT] = (shape.vocab_size, shape.hidden_size)
        rules.append(_vocabulary_rule("output_layer.weight", OUTPUT, shape))
    return WeightMap(tensors, tuple(rules))


def _norm(shape: ModelShape, layer: int, own_name: str, fused_into: str, source: str) -> LayerPart:
    """A layer's norm, which Transformer Engine fuses into the linear layer after it."""
    ours, tensor = f"decoder.layers.{layer}.", f"model.layers.{layer}.{source}.weight"
    names = (f"{ours}{own_name}.weight", f"{ours}{fused_into}.layer_norm_weight")
    return LayerPart({tensor: (shape.hidden_size,)}, (whole(*names, source=tensor, length=shape.hidden_size),))


def _residual_norm(shape: ModelShape, layer: int, own_name: str, source: str | None) -> LayerPart:
    """The norm in Megatron's step that adds to the residual stream (`models/variants.py`)."""
    if source is None:
        return LayerPart({}, ())
    ours, tensor = f"decoder.layers.{layer}.{own_name}.norm.weight", f"model.layers.{layer}.{source}.weight"
    return LayerPart({tensor: (shape.hidden_size,)}, (whole(ours, source=tensor, length=shape.hidden_size),))


def _fused_qkv(shape: ModelShape, prefix: str, kind: str) -> Block:
    """Megatron's row order: for each KV head, the rows of its query heads, then its K rows, then its V rows."""
    query, key, value = (f"{prefix}{name}_proj.{kind}" for name in ("q", "k", "v"))
    rows, query_rows = shape.head_dim, shape.queries_per_group * shape.head_dim
    block: list[Segment] = []
    for group in range(shape.num_kv_heads):
        block.append(Segment(query, group * query_rows, query_rows))
        block.append(Segment(key, group * rows, rows))
        block.append(Segment(value, group * rows, rows))
    return tuple(block)


def whole(*names: str, source: str, length: int, is_optional: bool = False) -> Rule:
    """A parameter that every TP rank holds whole."""
    return Rule(names, None, ((Segment(source, 0, length),),), is_optional=is_optional)


def _vocabulary_rule(name: str, source: str, shape: ModelShape, is_copy: bool = False) -> Rule:
    return Rule((name,), 0, ((Segment(source, 0, shape.vocab_size),),), is_vocabulary=True, is_copy=is_copy)
