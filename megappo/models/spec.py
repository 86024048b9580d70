"""The layers that a model is built of: Transformer Engine's, or Megatron's with the torch layers of `layers.py`."""

import megappo.parallel.runtime as runtime  # isort: skip  before megatron

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megappo.errors import ConfigError
from megappo.models.experts import GroupedExperts
from megappo.models.families.base import ModelShape
from megappo.models.latent_attention import LatentAttention, SpecifiedLatentAttention
from megappo.models.layers import CoreAttention, RMSNorm
from megappo.models.router import Router, Routing

Layers = Literal["auto", "te", "torch"]
Dispatcher = Literal["alltoall", "allgather"]
"""How Megatron moves tokens between the ranks of an expert-parallel group."""
ContextExchange = Literal["all_gather", "a2a"]
"""What attention exchanges between context-parallel ranks: keys and values, or tokens for heads."""
Experts = Literal["grouped", "sequential"]
"""All local experts of a layer in two parameters (`experts.py`), or Megatron's one module an expert."""


def block_spec(
    layers: Layers,
    experts: Experts,
    shape: ModelShape,
    numbers: Iterable[int],
    routing: Routing | None = None,
    *,
    dtype: torch.dtype,
) -> TransformerBlockSubmodules:
    """The decoder block of the layers `numbers`, counted over the model from 0, with experts where the shape has them,
    whose routers share `routing`.

    ConfigError where "te" is asked for and missing.
    """
    if layers == "te" and shape.needs_torch_layers:
        raise ConfigError(
            "model.layers: 'te', but this family's windows, soft caps or norms are computed in torch layers alone; "
            "use 'auto' or 'torch'"
        )
    if layers == "te" and not runtime.has_transformer_engine():
        raise ConfigError("model.layers: 'te', but Transformer Engine or a GPU is missing here; use 'auto' or 'torch'")
    is_torch = not takes_te(layers, shape, dtype)
    layer = _torch_layer if is_torch else _te_layer

    def spec(number: int) -> ModuleSpec:
        if shape.moe is None or number in shape.moe.dense_layers:
            return layer(shape, None)
        assert routing is not None, "the routers of a stage share a Routing"
        parts: dict[str, Any] = {"router": partial(Router, shared=routing)}
        if experts == "grouped":
            parts["experts"] = GroupedExperts
        return _with_moe_parts(layer(shape, shape.moe.num_experts), parts)

    specs = [spec(number) for number in numbers]
    if is_torch:
        return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)
    from megatron.core.extensions.transformer_engine import TENorm  # cannot be imported without Transformer Engine

    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=TENorm)


def takes_te(layers: Layers, shape: ModelShape, dtype: torch.dtype) -> bool:
    """Whether the layers are Transformer Engine's, which `auto` takes in 16 bits alone.

    Of float32 matrices it computes products in TF32, with a mantissa of 10 bits (2.12), whatever torch is told.
    """
    if layers == "torch" or shape.needs_torch_layers or not runtime.has_transformer_engine():
        return False
    return layers == "te" or dtype.itemsize == 2


def check_packed_exchange(
    layers: Layers, shape: ModelShape, cp_comm_type: ContextExchange, *, dtype: torch.dtype
) -> None:
    """ConfigError where context-parallel ranks would gather packed sequences with Transformer Engine."""
    if cp_comm_type == "all_gather" and takes_te(layers, shape, dtype):
        raise ConfigError(
            "model.cp_comm_type: 'all_gather', with which Transformer Engine takes no packed sequences "
            "(model.use_remove_padding); set it to a2a, or model.layers to torch"
        )


def _te_layer(shape: ModelShape, num_experts: int | None) -> ModuleSpec:
    is_latent = shape.latent is not None
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=num_experts, qk_layernorm=shape.qk_norm or is_latent, multi_latent_attention=is_latent
    )
    layer = spec.submodules
    names = layer.sharded_state_dict_keys_map | te_checkpoint_names(is_latent, has_experts=num_experts is not None)
    layer = replace(layer, sharded_state_dict_keys_map=names)
    if is_latent:
        layer = replace(layer, self_attention=replace(layer.self_attention, module=SpecifiedLatentAttention))
    return replace(spec, submodules=layer)


def te_checkpoint_names(is_latent: bool, has_experts: bool) -> dict[str, str]:
    """Beginnings of names in a layer of Transformer Engine → those that Megatron's local layer has in checkpoints.

    Megatron has the local layer save its norms as Transformer Engine fuses them into the next linear layer, which it
    does not before experts; with latent attention each kind saves them where it has them.
    """
    if not is_latent:
        return {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"} if has_experts else {}
    names = {
        f"self_attention.linear_{name}_up_proj.layer_norm_": f"self_attention.{name}_layernorm." for name in ("q", "kv")
    }
    if not has_experts:
        names["mlp.linear_fc1.layer_norm_"] = "pre_mlp_layernorm."
    return names


def _torch_layer(shape: ModelShape, num_experts: int | None) -> ModuleSpec:
    """Megatron's local layer with norms and core attention exchanged."""
    is_latent = shape.latent is not None
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts, qk_layernorm=shape.qk_norm or is_latent, multi_latent_attention=is_latent,
        normalization="RMSNorm",
    )  # fmt: skip
    layer = spec.submodules
    attention = layer.self_attention
    norm = RMSNorm if shape.qk_norm or is_latent else IdentityOp
    norms = {"q_layernorm": norm, "kv_layernorm" if is_latent else "k_layernorm": norm}
    attention = replace(
        attention,
        module=LatentAttention if is_latent else attention.module,
        submodules=replace(attention.submodules, core_attention=CoreAttention, **norms),
    )
    layer = replace(layer, input_layernorm=RMSNorm, pre_mlp_layernorm=RMSNorm, self_attention=attention)
    return replace(spec, submodules=layer)


def _with_moe_parts(spec: ModuleSpec, parts: dict[str, Any]) -> ModuleSpec:
    mlp: Any = spec.submodules.mlp
    if isinstance(mlp, ModuleSpec):  # megatron-core 0.16
        mlp = replace(mlp, submodules=replace(mlp.submodules, **parts))
    else:  # 0.19 has a partial of the layer's class there
        mlp = partial(mlp, submodules=replace(mlp.keywords["submodules"], **parts))
    return replace(spec, submodules=replace(spec.submodules, mlp=mlp))
