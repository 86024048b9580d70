"""Checkpoints that one kind of layers wrote, read by another. Transformer Engine against torch: tests/gpu; here what
differs between them is made to differ without it."""

from pathlib import Path

import pytest
import torch

from megappo.models import spec
from megappo.models.build import read_model
from tests.support.ranks import run_ranks
from tests.support.tiny_models import tiny_model


def test_extra_state_of_layers_is_no_part_of_a_checkpoint_that_is_missed(tmp_path: Path) -> None:
    for family in ("qwen3_moe", "deepseek_v3"):
        tiny_model(tmp_path / "models" / family, family, dtype=torch.bfloat16)
    results = run_ranks(
        "tests.distributed.programs.layers", "--models", tmp_path / "models", "--kinds", "auto", "torch",
        "--no-extra-state", nproc=1,
    )  # fmt: skip
    assert results.keys() == {"qwen3_moe", "deepseek_v3"}
    for found in results.values():
        assert min(found["saved and exported"]) > 10 and found["between"] == 0


# The parameter of a torch layer, and the same one of Transformer Engine's.
FUSED = [
    ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
    ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
]
LATENT = [
    ("input_layernorm.weight", "input_layernorm.weight"),
    ("self_attention.q_layernorm.weight", "self_attention.linear_q_up_proj.layer_norm_weight"),
    ("self_attention.kv_layernorm.weight", "self_attention.linear_kv_up_proj.layer_norm_weight"),
]
ALONE = [("pre_mlp_layernorm.weight", "pre_mlp_layernorm.weight")]


@pytest.mark.parametrize(
    ("family", "has_experts", "pairs"),
    [
        ("qwen3", False, FUSED),
        ("qwen3_moe", True, FUSED[:1] + ALONE),
        ("deepseek_v3", False, LATENT + FUSED[1:]),
        ("deepseek_v3", True, LATENT + ALONE),
    ],
)
def test_both_kinds_save_a_norm_under_one_name(
    family: str, has_experts: bool, pairs: list[tuple[str, str]], tmp_path: Path
) -> None:
    shape = read_model(tiny_model(tmp_path, family)).shape  # type: ignore[arg-type]
    torch_names = spec._torch_layer(shape, 4 if has_experts else None).submodules.sharded_state_dict_keys_map
    te_names = spec.te_checkpoint_names(shape.latent is not None, has_experts)
    for ours, theirs in pairs:
        assert saved(ours, torch_names) == saved(theirs, te_names)


def saved(name: str, names: dict[str, str]) -> str:
    """As Megatron maps a name of a layer on its way into a checkpoint."""
    for beginning, other in names.items():
        if name.startswith(beginning):
            return other + name.removeprefix(beginning)
    return name
