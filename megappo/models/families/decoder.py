"""The weight map of a dense pre-norm decoder, which Llama, Qwen2 and Qwen3 share; they differ in switches of the shape.

Imports no torch. The names on the left are Megatron's, those on the right Hugging Face's.
"""

from megappo.models.families.base import ModelShape
from megappo.models.weight_map import Block, Head, Rule, Segment, Shape, WeightMap

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
OUTPUT = "lm_head.weight"
SCORE = "score.weight"


def decoder_weight_map(shape: ModelShape, head: Head) -> WeightMap:
    """Embedding, layers, final norm and head. A value model has its own head and is never tied."""
    tensors: dict[str, Shape] = {EMBEDDING: (shape.vocab_size, shape.hidden_size)}
    rules = [_vocabulary_rule("embedding.word_embeddings.weight", EMBEDDING, shape)]
    for layer in range(shape.num_layers):
        tensors |= _layer_tensors(shape, layer)
        rules += _layer_rules(shape, layer)
    tensors[FINAL_NORM] = (shape.hidden_size,)
    rules.append(_whole("decoder.final_layernorm.weight", source=FINAL_NORM, length=shape.hidden_size))
    if head == "value":
        tensors[SCORE] = (1, shape.hidden_size)
        rules.append(_whole("output_layer.weight", source=SCORE, length=1, is_optional=True))
    elif shape.tied:
        # Only the last of several pipeline stages has this parameter, its own copy of the embedding.
        rules.append(_vocabulary_rule("output_layer.weight", EMBEDDING, shape, is_copy=True))
    else:
        tensors[OUTPUT] = (shape.vocab_size, shape.hidden_size)
        rules.append(_vocabulary_rule("output_layer.weight", OUTPUT, shape))
    return WeightMap(tensors, tuple(rules))


def _layer_tensors(shape: ModelShape, layer: int) -> dict[str, Shape]:
    prefix = f"model.layers.{layer}."
    query_rows, kv_rows = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    rows = {"q": query_rows, "k": kv_rows, "v": kv_rows}
    tensors: dict[str, Shape] = {"input_layernorm.weight": (shape.hidden_size,)}
    for name, length in rows.items():
        tensors[f"self_attn.{name}_proj.weight"] = (length, shape.hidden_size)
        if shape.qkv_bias:
            tensors[f"self_attn.{name}_proj.bias"] = (length,)
    if shape.qk_norm:
        tensors |= {"self_attn.q_norm.weight": (shape.head_dim,), "self_attn.k_norm.weight": (shape.head_dim,)}
    tensors["self_attn.o_proj.weight"] = (shape.hidden_size, query_rows)
    tensors["post_attention_layernorm.weight"] = (shape.hidden_size,)
    tensors["mlp.gate_proj.weight"] = (shape.ffn_size, shape.hidden_size)
    tensors["mlp.up_proj.weight"] = (shape.ffn_size, shape.hidden_size)
    tensors["mlp.down_proj.weight"] = (shape.hidden_size, shape.ffn_size)
    return {prefix + name: size for name, size in tensors.items()}


def _layer_rules(shape: ModelShape, layer: int) -> list[Rule]:
    ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    hidden, ffn = shape.hidden_size, shape.ffn_size
    gate, up, down = (f"{theirs}mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
    output, output_columns = f"{theirs}self_attn.o_proj.weight", shape.num_heads * shape.head_dim
    rules = [
        _whole(
            f"{ours}input_layernorm.weight", f"{ours}self_attention.linear_qkv.layer_norm_weight",
            source=f"{theirs}input_layernorm.weight", length=hidden,
        ),
        Rule((f"{ours}self_attention.linear_qkv.weight",), 0, (_fused_qkv(shape, theirs, "weight"),)),
        Rule((f"{ours}self_attention.linear_proj.weight",), 1, ((Segment(output, 0, output_columns),),)),
        _whole(
            f"{ours}pre_mlp_layernorm.weight", f"{ours}mlp.linear_fc1.layer_norm_weight",
            source=f"{theirs}post_attention_layernorm.weight", length=hidden,
        ),
        Rule((f"{ours}mlp.linear_fc1.weight",), 0, ((Segment(gate, 0, ffn),), (Segment(up, 0, ffn),))),
        Rule((f"{ours}mlp.linear_fc2.weight",), 1, ((Segment(down, 0, ffn),),)),
    ]  # fmt: skip
    if shape.qkv_bias:
        rules.append(Rule((f"{ours}self_attention.linear_qkv.bias",), 0, (_fused_qkv(shape, theirs, "bias"),)))
    if shape.qk_norm:
        for name in ("q", "k"):
            source = f"{theirs}self_attn.{name}_norm.weight"
            rules.append(_whole(f"{ours}self_attention.{name}_layernorm.weight", source=source, length=shape.head_dim))
    return rules


def _fused_qkv(shape: ModelShape, prefix: str, kind: str) -> Block:
    """Megatron's row order: for each KV head, the rows of its query heads, then its K rows, then its V rows."""
    query, key, value = (f"{prefix}self_attn.{name}_proj.{kind}" for name in ("q", "k", "v"))
    rows, query_rows = shape.head_dim, shape.queries_per_group * shape.head_dim
    block: list[Segment] = []
    for group in range(shape.num_kv_heads):
        block.append(Segment(query, group * query_rows, query_rows))
        block.append(Segment(key, group * rows, rows))
        block.append(Segment(value, group * rows, rows))
    return tuple(block)


def _whole(*names: str, source: str, length: int, is_optional: bool = False) -> Rule:
    """A parameter that every TP rank holds whole."""
    return Rule(names, None, ((Segment(source, 0, length),),), is_optional=is_optional)


def _vocabulary_rule(name: str, source: str, shape: ModelShape, is_copy: bool = False) -> Rule:
    return Rule((name,), 0, ((Segment(source, 0, shape.vocab_size),),), is_vocabulary=True, is_copy=is_copy)
