"""Builds a model's stage on Megatron, for training. Weights come from `import_hf.py`.

GPTModel is constructed here and, without weights, in `engines/native/piece_model.py` alone.
"""

import megappo.parallel.runtime as runtime  # isort: skip  before megatron

import math
from dataclasses import asdict
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from megappo.config.layout import LayoutConfig
from megappo.config.recompute import NO_RECOMPUTE, Recompute
from megappo.models.architecture import ModelSpec, check_exchanged_heads, check_layout, read_model
from megappo.models.chunks import ModelChunks, StageModel
from megappo.models.families.base import Llama3RopeScaling, ModelShape
from megappo.models.fits import check_recompute
from megappo.models.heads import ValueHead
from megappo.models.layers import RMSNorm
from megappo.models.recompute import keep_gradient_path
from megappo.models.router import Routing
from megappo.models.routing import moe_layers
from megappo.models.spec import (
    ContextExchange,
    Dispatcher,
    Experts,
    Layers,
    block_spec,
    check_packed_exchange,
    takes_te,
)
from megappo.models.stage_parameters import stage_parameters
from megappo.models.variants import ACTIVATIONS, add_variants
from megappo.models.weight_map import Head, padded_vocab_size
from megappo.parallel.mesh import Mesh

__all__ = ["ModelSpec", "build_model", "read_model"]


def build_model(
    spec: ModelSpec,
    mesh: Mesh,
    *,
    dtype: torch.dtype,
    layers: Layers,
    head: Head,
    experts: Experts = "grouped",
    dispatcher: Dispatcher = "alltoall",
    recompute: Recompute = NO_RECOMPUTE,
    cp_comm_type: ContextExchange = "all_gather",
    is_packed: bool = False,
) -> StageModel:
    """This rank's shard of the model, on `mesh.device`, its weights undefined (a value head's are zero); with virtual
    pipeline stages in as many chunks. `is_packed`: it will be given packed sequences.

    `model(tokens [b, s], position_ids [b, s], attention_mask=None)`, each of this rank's s / cp tokens, returns on the
    last stage their logits `[b, s, padded vocab / tp]` in `dtype`, or float32 values `[b, s, 1]`; on other stages
    hidden states, whose input comes through `set_input_tensor`. A value model is untied. Raises ConfigError where the
    layout does not divide the model, `layers` is missing here, or can't exchange packed sequences.
    """
    shape = spec.shape
    check_layout(shape, _layout(mesh))
    if mesh.cp > 1 and cp_comm_type == "a2a":
        check_exchanged_heads(shape, mesh.tp * mesh.cp)
    if mesh.cp > 1 and is_packed:
        check_packed_exchange(layers, shape, cp_comm_type, dtype=dtype)
    check_recompute(shape, recompute, has_fused_norms=takes_te(layers, shape, dtype))
    config = transformer_config(shape, mesh, dtype, dispatcher, recompute, cp_comm_type)
    stages = mesh.stage_layers(shape.num_layers)
    routing = Routing(shape.moe, moe_layers(shape.moe, shape.num_layers)) if shape.moe is not None else None
    chunks = []
    for number in range(mesh.vpp):
        stage = number * mesh.pp + mesh.pp_rank
        first = sum(stages[:stage])
        block = block_spec(layers, experts, shape, range(first, first + stages[stage]), routing, dtype=dtype)
        chunk = _chunk(shape, mesh, config, block, head, number)
        if recompute.granularity is not None and chunk.pre_process:
            chunk.embedding.register_forward_hook(keep_gradient_path)
        chunk.expert_routing = routing
        chunks.append(chunk)
    model = chunks[0] if mesh.vpp == 1 else ModelChunks(chunks, stages)
    model.to(mesh.device)  # Megatron makes the router's and the shared expert's gate on the CPU
    _mark_shards(model, spec, head)
    return model


def _chunk(
    shape: ModelShape,
    mesh: Mesh,
    config: TransformerConfig,
    block: TransformerBlockSubmodules,
    head: Head,
    number: int,
) -> GPTModel:
    """The layers of `block`, with the embedding on the first stage and the head on the last; `number` counts the chunks
    of this rank."""
    is_last = mesh.is_last_stage and number == mesh.vpp - 1
    model = GPTModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=padded_vocab_size(shape.vocab_size, mesh.tp),
        max_sequence_length=shape.max_positions,
        pre_process=mesh.is_first_stage and number == 0,
        post_process=is_last,
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied and head == "lm",
        position_embedding_type="rope",
        rotary_percent=shape.rotary_percent,
        rotary_base=shape.rope_theta,
        vp_stage=number if mesh.vpp > 1 else None,
    )
    if shape.rope_scaling is not None:
        # Megatron's own llama3 scaling has fixed ramp bounds and original length (0.16.1, 0.19.2). Before the table of
        # local layers comes beside this one: it is not scaled.
        model.rotary_pos_emb.inv_freq = llama3_frequencies(model.rotary_pos_emb.inv_freq, shape.rope_scaling)
    add_variants(model, shape, RMSNorm, head)
    if head == "value" and is_last:
        model.output_layer = ValueHead(
            shape.hidden_size,
            dtype=config.params_dtype,
            device=mesh.device,
            sequence_parallel=mesh.sequence_parallel,
            tp_group=mesh.tp_group,
        )
    return model


def _layout(mesh: Mesh) -> LayoutConfig:
    sizes = {"tp": mesh.tp, "pp": mesh.pp, "vpp": mesh.vpp, "cp": mesh.cp, "ep": mesh.ep, "etp": mesh.etp}
    return LayoutConfig(**sizes, sequence_parallel=mesh.sequence_parallel, **asdict(mesh.split))


def _mark_shards(model: StageModel, spec: ModelSpec, head: Head) -> None:
    """Sets the attributes by which Megatron knows shards from copies.

    `tensor_model_parallel` tells the gradient norm that a parameter is no copy that every TP rank holds. Megatron sets
    it on weights only while it initialises them (0.16.1, 0.19.2), which is skipped here; without it the norm, and so
    clipping, counts the shards of TP rank 0 alone.
    `allreduce` False makes the gradients of experts be summed over the ranks that hold copies of them. Megatron sets it
    where there are several EP ranks (0.16.1, 0.19.2); with whole experts on TP ranks there are other copies than of
    dense weights too, and each would learn from its own rank's tokens alone. Here it is set always: experts then have
    an optimizer of their own on every layout, and a checkpoint looks the same.
    """
    for item in stage_parameters(model, spec.family.weight_map(spec.shape, head)):
        parameter = item.parameter
        if item.expert is not None:
            parameter.allreduce = False  # type: ignore[attr-defined]
        if item.rule.axis is not None and not getattr(parameter, "tensor_model_parallel", False):
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
            parameter.partition_dim = item.rule.axis + parameter.dim() - item.tensor.dim()  # type: ignore[attr-defined]
            parameter.partition_stride = 1  # type: ignore[attr-defined]


def transformer_config(
    shape: ModelShape,
    mesh: Mesh,
    dtype: torch.dtype,
    dispatcher: Dispatcher = "alltoall",
    recompute: Recompute = NO_RECOMPUTE,
    cp_comm_type: ContextExchange = "all_gather",
) -> TransformerConfig:
    """Megatron's configuration of a decoder without dropout."""
    kind, latent = (TransformerConfig, {}) if shape.latent is None else (MLATransformerConfig, _latent_config(shape))
    return kind(
        **latent,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=ACTIVATIONS[shape.activation],
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        layernorm_zero_centered_gamma=shape.zero_centered_norms,
        rotary_interleaved=shape.rotary_interleaved,
        softmax_scale=shape.softmax_scale,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=mesh.tp,
        pipeline_model_parallel_size=mesh.pp,
        **_virtual_config(mesh),
        context_parallel_size=mesh.cp,
        cp_comm_type=cp_comm_type if mesh.cp > 1 else None,
        sequence_parallel=mesh.sequence_parallel,
        variable_seq_lengths=mesh.pp > 1,
        # The default, allgather, refuses variable lengths even where there are no experts (0.16.1).
        moe_token_dispatcher_type=dispatcher,
        **_stages_config(shape, mesh),
        **_experts_config(shape, mesh),
        recompute_granularity=recompute.granularity,
        recompute_method=recompute.method,
        recompute_num_layers=recompute.num_layers,
        recompute_modules=list(recompute.modules),
        calculate_per_token_loss=True,
        use_cpu_initialization=runtime.on_cpu,
        perform_initialization=False,
        gradient_accumulation_fusion=runtime.fuses_weight_gradients(),
        # Fusions that need Apex or TE, or compile kernels, for layers that TE fuses anyway.
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )


def _virtual_config(mesh: Mesh) -> dict[str, Any]:
    """Of the interleaved schedule, which has no batched transfers."""
    if mesh.vpp == 1:
        return {}
    return {"virtual_pipeline_model_parallel_size": mesh.vpp, "overlap_p2p_comm": True, "batch_p2p_comm": False}


def _stages_config(shape: ModelShape, mesh: Mesh) -> dict[str, Any]:
    """Unequal stages. However they were asked for, Megatron is told the numbers of the first and the last: the others
    are alike. Of virtual ones it is told the layers one by one, for its numbers are those of a rank (0.16.1)."""
    stages = mesh.stage_layers(shape.num_layers)
    if len(set(stages)) == 1:
        return {}
    if mesh.vpp > 1:
        parts = [["decoder"] * size for size in stages]
        parts[0].insert(0, "embedding")
        parts[-1].append("loss")
        return {"pipeline_model_parallel_layout": parts}
    return {"num_layers_in_first_pipeline_stage": stages[0], "num_layers_in_last_pipeline_stage": stages[-1]}


def _latent_config(shape: ModelShape) -> dict[str, Any]:
    latent = shape.latent
    assert latent is not None, "only latent attention has these sizes"
    sizes: dict[str, Any] = {
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": shape.head_dim - latent.rope_head_dim,
        "qk_pos_emb_head_dim": latent.rope_head_dim,
        "v_head_dim": latent.value_head_dim,
        "rotary_base": shape.rope_theta,
    }
    yarn = latent.yarn
    if yarn is None:
        return sizes | {"rope_type": "rope"}
    return sizes | {
        "rope_type": "yarn",
        "rotary_scaling_factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_max_positions,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "mscale": yarn.mscale,
        "mscale_all_dim": yarn.mscale_all_dim,
    }


def _experts_config(shape: ModelShape, mesh: Mesh) -> dict[str, Any]:
    """Of the router, Megatron's own part is the logits, in float32; the rest is in `router.py`."""
    if shape.moe is None:
        return {}
    moe = shape.moe
    return {
        "num_moe_experts": moe.num_experts,
        "moe_ffn_hidden_size": moe.ffn_size,
        "moe_router_topk": moe.top_k,
        # Not read by our router; Megatron refuses one expert a token without it (0.16.1).
        "moe_router_pre_softmax": True,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_shared_expert_intermediate_size": moe.shared_ffn_size or None,
        "moe_shared_expert_gate": moe.has_shared_gate,
        # A list tells checkpoints that layers differ.
        "moe_layer_freq": [int(layer not in moe.dense_layers) for layer in range(shape.num_layers)]
        if moe.dense_layers
        else 1,
        "expert_model_parallel_size": mesh.ep,
        "expert_tensor_parallel_size": mesh.etp,
    }


def llama3_frequencies(frequencies: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """[head_dim / 2] inverse wavelengths, radians a token, scaled as in Llama 3.1 (its `apply_scaling`).

    Wavelengths over original/low are divided by `factor`, those under original/high kept, the rest blended linearly in
    original/wavelength.
    """
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies
