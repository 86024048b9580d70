"""Builds the GPTModel of a generation layout: one stage, cut over the decoding ranks, without a weight of its own."""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

from dataclasses import replace

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megappo.engines.hybrid.weights import GenerationWeights
from megappo.engines.native.piece_attention import PieceAttention, PieceLatentAttention
from megappo.engines.native.piece_experts import ExpertsPieces
from megappo.engines.native.pieces import (
    ColumnPieces,
    MLPPieces,
    NormPieces,
    OutputPieces,
    PieceModule,
    RowPieces,
    VocabularyPieces,
)
from megappo.engines.native.ranks import DecodingRanks
from megappo.models.build import llama3_frequencies, transformer_config
from megappo.models.families.base import ModelShape
from megappo.models.layers import CoreAttention
from megappo.models.router import Routing
from megappo.models.routing import moe_layers
from megappo.models.variants import add_variants
from megappo.parallel.mesh import Mesh


def build_piece_model(
    shape: ModelShape, mesh: Mesh, ranks: DecodingRanks, weights: GenerationWeights, dtype: torch.dtype
) -> GPTModel:
    """The whole model on `ranks`, which computes on what `weights` holds when it runs; it has no parameters.

    `mesh` is the training layout, of which only what both layouts share is read.
    """
    size = ranks.tp_group.size()
    layout = replace(mesh, tp=size, pp=1, vpp=1, cp=1, ep=1, etp=1, sequence_parallel=False)
    # Without experts: theirs is a module that asks Megatron for nothing.
    config = transformer_config(replace(shape, moe=None), layout, dtype)
    groups = ProcessGroupCollection(tp=ranks.tp_group, pp=ranks.pp_group, cp=ranks.pp_group, embd=None)
    model = GPTModel(
        config=config,
        transformer_layer_spec=_block(shape),
        # GPTModel makes embedding and output layer itself: a row each, until they are replaced.
        vocab_size=size,
        max_sequence_length=shape.max_positions,
        parallel_output=True,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_percent=shape.rotary_percent,
        rotary_base=shape.rope_theta,
        pg_collection=groups,
    )
    model.embedding.word_embeddings = VocabularyPieces()
    model.output_layer = OutputPieces()
    if shape.rope_scaling is not None:  # of the other layers' table alone, where local ones have their own
        model.rotary_pos_emb.inv_freq = llama3_frequencies(model.rotary_pos_emb.inv_freq, shape.rope_scaling)
    add_variants(model, shape, NormPieces, "lm")
    if shape.moe is not None:
        routing = model.expert_routing = Routing(shape.moe, moe_layers(shape.moe, shape.num_layers))
        for place, number in enumerate(routing.layers):
            model.decoder.layers[number].mlp = ExpertsPieces(shape.moe, place, routing)
    for name, module in model.named_modules():
        if isinstance(module, PieceAttention):
            module.ranks = ranks
        if isinstance(module, PieceModule):
            is_tied = module is model.output_layer and shape.tied
            module.bind(weights, ranks, "embedding.word_embeddings" if is_tied else name)
    own = [name for name, _ in model.named_parameters()]
    assert not own, f"the generation model holds weights of its own: {', '.join(own)}"
    return model.eval()


def _block(shape: ModelShape) -> TransformerBlockSubmodules:
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=NormPieces,
            self_attention=_grouped_attention(shape) if shape.latent is None else _latent_attention(),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=NormPieces,
            mlp=MLPPieces,
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * shape.num_layers, layer_norm=NormPieces)


def _grouped_attention(shape: ModelShape) -> ModuleSpec:
    norm = NormPieces if shape.qk_norm else IdentityOp
    return ModuleSpec(
        module=PieceAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnPieces,
            core_attention=CoreAttention,
            linear_proj=RowPieces,
            q_layernorm=norm,
            k_layernorm=norm,
        ),
    )


def _latent_attention() -> ModuleSpec:
    return ModuleSpec(
        module=PieceLatentAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=ColumnPieces,
            linear_q_up_proj=ColumnPieces,
            linear_kv_up_proj=ColumnPieces,
            core_attention=CoreAttention,
            linear_proj=RowPieces,
            q_layernorm=NormPieces,
            kv_layernorm=NormPieces,
        ),
    )
