"""Whether a model can be built and trained as an experiment says, or what its ranks would refuse. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path

from megappo.config.experiment import ExperimentConfig
from megappo.config.lora import LoraConfig
from megappo.config.pipeline import EVEN, PipelineSplit
from megappo.config.recompute import NO_RECOMPUTE, Recompute
from megappo.errors import ConfigError
from megappo.models.adapter_map import adapter_targets, refuse_kinds_for_experts
from megappo.models.architecture import check_exchanged_heads, check_layout, read_model
from megappo.models.families.base import ModelShape
from megappo.models.weight_map import Head


def require_fitting_models(config: ExperimentConfig) -> None:
    """ConfigError or DataError for the first model of the experiment that its ranks would refuse."""
    model = config.model
    head: Head = "value" if config.trainer.kind == "reward_model" else "lm"
    _require_fit(config, model.path, head, model.recompute, model.lora, "model.lora")
    if config.trainer.kind == "ppo" and config.needs_critic:
        _require_fit(
            config, config.critic.path or model.path, "value", model.recompute, config.critic.lora, "critic.lora"
        )
    if config.has_reference and config.ref.path is not None:
        _require_fit(config, config.ref.path, "lm", NO_RECOMPUTE, None)


def _require_fit(
    config: ExperimentConfig,
    path: str,
    head: Head,
    recompute: Recompute,
    lora: LoraConfig | None,
    setting: str = "",
) -> None:
    """Of one role; without `lora` it is not trained."""
    layout, spec = config.layout, read_model(Path(path))
    shape = spec.shape
    check_layout(shape, layout)
    if layout.cp > 1 and config.model.cp_comm_type == "a2a":
        check_exchanged_heads(shape, layout.tp * layout.cp)
    # Whether `auto` will take Transformer Engine's layers is known on the ranks alone.
    check_recompute(shape, recompute, has_fused_norms=config.model.layers == "te")
    if lora is None:
        return
    if shape.moe is not None and shape.moe.dense_layers:
        has_experts = [int(layer not in shape.moe.dense_layers) for layer in range(shape.num_layers)]
        virtual = layout.split.stages(shape.num_layers, layout.num_stages) if layout.vpp > 1 else None
        refuse_stages_without_experts(has_experts, layout.pp, layout.split, virtual)
    if lora.is_used:
        weight_map = spec.family.weight_map(shape, head)
        targets = adapter_targets(weight_map, lora.target_modules, setting)
        refuse_kinds_for_experts(weight_map, targets, lora, setting)


def check_recompute(shape: ModelShape, recompute: Recompute, *, has_fused_norms: bool) -> None:
    """ConfigError for modules that this model has not got. `has_fused_norms`: layers are Transformer Engine's, whose
    norms are a part of the linear layer behind them, and only a norm before experts stands alone."""
    if recompute.granularity != "selective":
        return
    moe = shape.moe
    has_mlp = moe is None or bool(moe.dense_layers)
    absent = {
        "mlp": "all layers of this model have experts; moe is their part" if not has_mlp else None,
        "moe": "this model is dense; mlp is its layers' part" if moe is None else None,
        "shared_experts": "this model has none" if moe is None or not moe.shared_ffn_size else None,
        "layernorm": "Transformer Engine's layers make norm and linear layer in one; leave it out, or set model.layers "
        "to torch"
        if has_fused_norms and moe is None
        else None,
    }
    for module in recompute.modules:
        reason = absent.get(module)
        if reason is not None:
            raise ConfigError(f"model.recompute_modules: {module}, but {reason}")


def refuse_stages_without_experts(
    has_experts: list[int] | int, pp: int, split: PipelineSplit = EVEN, virtual: Sequence[int] | None = None
) -> None:
    """ConfigError, the same on every rank, where one pipeline rank has experts and another none. `virtual`: layers of
    its virtual stages.

    `has_experts` tells it of each layer, or is a number where all layers are alike. Megatron makes an optimizer for the
    experts of a stage (0.16.1, 0.19.2): ranks without it would neither take part in its gradient norm nor find its
    state in a checkpoint.
    """
    if not isinstance(has_experts, list):
        return
    if virtual is not None:
        _refuse_ranks_without_experts(has_experts, pp, virtual)
        return
    stages = split.stages(len(has_experts), pp)
    assert stages is not None, "checked when the model was built"
    first = 0
    for stage, size in enumerate(stages):
        if not any(has_experts[first : first + size]):
            raise ConfigError(
                f"layout.pp: {pp} makes stage {stage} of layers {first} to {first + size - 1}, none of "
                "which has experts, as layers of other stages have; set a smaller one"
            )
        first += size


def _refuse_ranks_without_experts(has_experts: list[int], pp: int, virtual: Sequence[int]) -> None:
    owners = [stage % pp for stage, size in enumerate(virtual) for _ in range(size)]
    for rank in range(pp):
        layers = [layer for layer, owner in enumerate(owners) if owner == rank]
        if not any(has_experts[layer] for layer in layers):
            raise ConfigError(
                f"layout.vpp: {len(virtual) // pp} gives pipeline rank {rank} layers {', '.join(map(str, layers))}, "
                "none of which has experts, as layers of other ranks have; set another one, or a smaller layout.pp"
            )
