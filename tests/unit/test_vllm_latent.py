"""DeepSeek's and Mixtral's shards in vLLM's parameters: names, what is fused, and what is made of the up projection."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megappo.config.grid import GenerationGrid
from megappo.config.rollout import RolloutConfig
from megappo.engines.hybrid.audit import Auditor
from megappo.engines.hybrid.kinds import Kinds
from megappo.engines.hybrid.layout_text import parse_layout
from megappo.engines.hybrid.plan import Planner
from megappo.engines.hybrid.transfers import Way
from megappo.engines.vllm.destination import VLLMDestination
from megappo.engines.vllm.latent import absorb_up_projections, absorbing_modules
from megappo.engines.vllm.start import check_engine, config_overrides
from megappo.engines.vllm.targets import VLLMTargets
from megappo.errors import ConfigError
from megappo.models.architecture import read_model
from megappo.models.families import FAMILIES

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 128, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2}
ATTENTION = "model.layers.{layer}.self_attn."


def plan(family: str, config: dict[str, Any], *, latent_kernels: bool = True) -> Planner:
    """Two ranks that share everything, experts whole, into vLLM's of the same layout."""
    shape = FAMILIES[family].shape(SIZES | config)
    kinds, training = Kinds.of(FAMILIES[family].weight_map(shape, "lm")), parse_layout("1-2-1@ep2")
    grid = GenerationGrid(training, 2)
    targets = VLLMTargets(kinds, shape, grid, expert_parallel=True, latent_kernels=latent_kernels)
    return Planner(
        kinds, training, targets, layers_of_stages=[2], element_bytes=2, bucket_bytes=1 << 20, generation_tp=2
    )


def names(planner: Planner, way: Way) -> set[str]:
    return {transfer.target for transfer in planner.receives(1) if transfer.way is way}


def test_both_down_projections_are_one_parameter() -> None:
    planner = plan("deepseek_v3", LATENT)
    Auditor(planner).check(1, list(planner.receives(1)))
    assert names(planner, Way.GATHER) == set()
    # By hand: rows of the query's low rank, then those of keys and values with the part for positions.
    assert names(planner, Way.LOCAL) == {f"{ATTENTION}fused_qkv_a_proj.weight"}
    fused = [transfer for transfer in planner.receives(1) if transfer.way is Way.LOCAL and transfer.layer == 1]
    assert [(each.source, each.target_offset, each.length) for each in fused] == [
        ("decoder.layers.{layer}.self_attention.linear_q_down_proj.weight", 0, 24),
        ("decoder.layers.{layer}.self_attention.linear_kv_down_proj.weight", 24, 16 + 8),
    ]
    assert {name for name in names(planner, Way.ALIAS) if "self_attn" in name} == {
        f"{ATTENTION}{name}.weight" for name in ("q_b_proj", "kv_b_proj", "o_proj", "q_a_layernorm", "kv_a_layernorm")
    }
    mlp = {name.partition(".mlp.")[2] for name in names(planner, Way.ALIAS) if ".mlp." in name}
    assert mlp == {
        "gate_up_proj.weight", "down_proj.weight", "gate.weight", "gate.e_score_correction_bias",
        "experts.w13_weight", "experts.w2_weight", "shared_experts.gate_up_proj.weight",
        "shared_experts.down_proj.weight",
    }  # fmt: skip


@pytest.mark.parametrize(("config", "kernels"), [(LATENT, False), (LATENT | {"q_lora_rank": None}, True)])
def test_down_projections_apart_are_bound(config: dict[str, Any], kernels: bool) -> None:
    """Where vLLM spells the attention out, and where queries have no low rank."""
    planner = plan("deepseek_v3", config, latent_kernels=kernels)
    Auditor(planner).check(1, list(planner.receives(1)))
    assert {transfer.way for transfer in planner.receives(1)} == {Way.ALIAS}
    queries = ("q_proj",) if config["q_lora_rank"] is None else ("q_a_proj", "q_b_proj")
    aliases = names(planner, Way.ALIAS)
    assert {f"{ATTENTION}{name}.weight" for name in (*queries, "kv_a_proj_with_mqa", "kv_b_proj")} <= aliases


def test_mixtrals_experts_are_bound() -> None:
    aliases = names(plan("mixtral", EXPERTS), Way.ALIAS)
    block = "model.layers.{layer}.block_sparse_moe."
    assert {f"{block}{name}" for name in ("gate.weight", "experts.w13_weight", "experts.w2_weight")} <= aliases


def test_experts_are_found_one_module_deeper() -> None:
    model, weight = nn.Module(), nn.Parameter(torch.ones(2))
    model.add_module("block_sparse_moe", nn.Module())
    model.block_sparse_moe.add_module("experts", nn.Module())
    model.block_sparse_moe.experts.add_module("routed_experts", nn.Module())
    model.block_sparse_moe.experts.routed_experts.w13_weight = weight
    found = VLLMDestination(model, torch.device("cpu")).parameter("block_sparse_moe.experts.w13_weight")
    assert found is weight


class Attention(nn.Module):
    """vLLM's, as far as the up projection goes: 3 heads, latents of 5, keys of 4 without positions, values of 2."""

    def __init__(self, weight: Tensor, *, is_view: bool) -> None:
        super().__init__()
        self.kv_b_proj = nn.Linear(5, 3 * (4 + 2), bias=False)
        self.kv_b_proj.weight.data = weight
        rows = weight.view(3, 6, 5)
        parts = rows[:, :4], rows[:, 4:].transpose(1, 2)
        self.W_UK_T, self.W_UV = parts if is_view else (torch.zeros_like(part) for part in parts)


@pytest.mark.parametrize("is_view", [False, True])
def test_decoding_on_latents_follows_the_up_projection(is_view: bool) -> None:
    """Scores and outputs on latents c are those of keys and values that are projected up."""
    torch.manual_seed(0)
    weight = torch.randn(18, 5)
    model = nn.Module()
    model.attention = Attention(weight, is_view=is_view)
    memory = [part.data_ptr() for part in (model.attention.W_UK_T, model.attention.W_UV)]
    weight.copy_(torch.randn(18, 5))  # an update, in place
    modules = absorbing_modules(model)
    assert modules == [model.attention]
    assert absorb_up_projections(modules) == (0 if is_view else (3 * 4 * 5 + 3 * 5 * 2) * 4)
    assert memory == [part.data_ptr() for part in (model.attention.W_UK_T, model.attention.W_UV)]
    latents, query = torch.randn(7, 5), torch.randn(3, 4)
    keys, values = (latents @ weight.T).view(7, 3, 6).split([4, 2], dim=-1)
    scores = torch.einsum("hp,hpl,tl->ht", query, model.attention.W_UK_T, latents)
    torch.testing.assert_close(scores, torch.einsum("hp,thp->ht", query, keys))
    mixed = torch.einsum("tl,hlv->thv", latents, model.attention.W_UV)
    torch.testing.assert_close(mixed, values)


def test_a_model_without_latents_is_left_alone() -> None:
    assert absorbing_modules(nn.Sequential(nn.Linear(2, 2))) == []


def write(folder: Path, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(SIZES | LATENT | config))
    return folder


def test_vllm_is_told_how_routers_choose(tmp_path: Path) -> None:
    third = config_overrides(read_model(write(tmp_path, model_type="deepseek_v3")))
    assert third == {
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "n_group": 4, "topk_group": 2,
    }  # fmt: skip
    second = config_overrides(read_model(write(tmp_path, model_type="deepseek_v2")))
    assert second == {
        "scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False, "n_group": 1, "topk_group": 1,
    }  # fmt: skip
    assert config_overrides(read_model(write(tmp_path, model_type="mixtral", **EXPERTS))) == {}


def test_what_vllm_can_not_do_with_latents_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megappo.engines.vllm.start.prepare_environment", lambda: None)
    engine = RolloutConfig(engine="vllm")
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    spec = read_model(write(tmp_path, model_type="deepseek_v3", rope_parameters=yarn))
    check_engine(engine, spec, 256)
    with pytest.raises(ConfigError, match=r"257 tokens are more than vLLM's RoPE table has positions, 4 times .* 64"):
        check_engine(engine, spec, 257)
    monkeypatch.setenv("VLLM_MLA_DISABLE", "0")
    with pytest.raises(ConfigError, match="leave VLLM_MLA_DISABLE unset, or set it to 1"):
        check_engine(engine, spec, 256)
