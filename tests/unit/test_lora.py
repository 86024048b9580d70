"""Adapters without ranks: which projections patterns name, how the rows of B are cut, what settings are refused."""
# ruff: noqa: E501  a line of a table is one case

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megappo.config.checks import check_experiment
from megappo.config.checks_adapter import adapter_problems
from megappo.config.load import load_experiment
from megappo.config.lora import LoraConfig
from megappo.config.problem import Problem, Severity
from megappo.errors import ConfigError
from megappo.models.adapter_map import (
    AdapterTarget,
    adapter_map,
    adapter_targets,
    peft_targets,
    refuse_kinds_for_experts,
)
from megappo.models.architecture import ModelSpec
from megappo.models.export_adapter import peft_config, put_rows
from megappo.models.families import FAMILIES
from megappo.models.weight_map import Rule, Segment, WeightMap
from tests.support.experiments import write_experiment

DENSE = {
    "model_type": "llama", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 2, "vocab_size": 64, "max_position_embeddings": 32, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "tie_word_embeddings": False, "rope_theta": 10000.0,
}  # fmt: skip
MOE = DENSE | {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 4,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


def weight_map(config: dict[str, object]) -> WeightMap:
    family = FAMILIES[str(config["model_type"])]
    return family.weight_map(family.shape(config), "lm")


def short_names(targets: tuple[AdapterTarget, ...]) -> list[str]:
    return sorted({name.rpartition(".")[2] for target in targets for name in target.projections})


def test_patterns_name_projections_by_their_last_part_or_by_their_path() -> None:
    dense = weight_map(DENSE)
    assert short_names(adapter_targets(dense, ["all-linear"])) == [
        "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"
    ]  # fmt: skip
    assert short_names(adapter_targets(dense, ["q_proj", "*.mlp.up_*"])) == ["q_proj", "up_proj"]
    targets = adapter_targets(weight_map(MOE), ["*.self_attn.*"])
    assert short_names(targets) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert [target.linear for target in targets[:2]] == [
        "decoder.layers.0.self_attention.linear_qkv", "decoder.layers.0.self_attention.linear_proj"
    ]  # fmt: skip


def test_rows_of_b_are_cut_as_the_weights_and_rows_without_an_adapter_are_padding() -> None:
    """Two KV heads of 2 queries, 2 rows a head: a rank of 2 has 4 rows of q, 2 of k, 2 of v."""
    dense, lora = weight_map(DENSE), LoraConfig(rank=3, target_modules=("q_proj", "v_proj"), type="dora")
    rules = adapter_map(dense, adapter_targets(dense, lora.target_modules), lora, "lm").by_parameter()
    prefix, peft = "decoder.layers.1.self_attention.linear_qkv_lora.", "base_model.model.model.layers.1.self_attn."
    assert rules[f"{prefix}lora_B.0"].shard(2, 1) == (
        Segment(f"{peft}q_proj.lora_B.weight", 4, 4), Segment(None, 0, 2), Segment(f"{peft}v_proj.lora_B.weight", 2, 2)
    )  # fmt: skip
    assert rules[f"{prefix}magnitude.0"].shard(1, 0)[0] == Segment(f"{peft}q_proj.lora_magnitude_vector", 0, 4)
    assert f"{prefix}lora_A.k_proj" not in rules


@pytest.mark.parametrize(
    ("config", "pattern", "message"),
    [
        (DENSE, "lm_head", "'lm_head' names no projection; there are down_proj, gate_proj, k_proj"),
        (DENSE, "model.layers.0.*", "other projections in one layer than in another; name them as q_proj"),
        (MOE, "mlp.gate", "names no projection; there are down_proj, gate_proj, k_proj"),
    ],
)
def test_what_patterns_may_not_name(config: dict[str, object], pattern: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        adapter_targets(weight_map(config), [pattern])
    assert str(raised.value).startswith("model.lora.target_modules: ") and message in str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "severity", "path"),
    [
        (["model.lora.rank=4", "model.lora.dropout=0.1", "layout.tp=2"], Severity.ERROR, "model.lora.dropout"),
        (["critic.lora.rank=4", "model.layers=te"], Severity.ERROR, "model.layers"),
        (["model.lora.alpha=32"], Severity.WARNING, "model.lora.alpha"),
        (["critic.lora.rank=4", "algorithm.adv_estimator=grpo", "rollout.n=2"], Severity.WARNING, "critic.lora.rank"),
    ],
)
def test_settings_that_cannot_be_or_do_nothing(
    tmp_path: Path, overrides: list[str], severity: Severity, path: str
) -> None:
    problems = check_experiment(load_experiment(write_experiment(tmp_path), overrides))
    assert [problem.severity for problem in problems if problem.path == path] == [severity]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"r": 8}, "model.lora.rank: 4: the adapters in F have 8; set it to 8"),
        ({"lora_alpha": 32}, "model.lora.alpha: 16.0: the adapters in F have 32; set it to 32"),
        ({"use_dora": True}, 'model.lora.type: "lora": the adapters in F have dora; set it to dora'),
        ({"use_rslora": True}, 'model.lora.adapter_path: "F": the adapters in F are rank-stabilized: '),
        ({"bias": "all"}, 'model.lora.adapter_path: "F": the adapters in F have trained biases (all), '),
        (
            {"init_lora_weights": "pissa_niter_16"},
            'model.lora.adapter_path: "F": the adapters in F belong to weights that PEFT has changed (init_lora_weights pissa_niter_16), not to the model\'s; save them again with path_initial_model_for_weight_conversion ',
        ),
        ({"init_lora_weights": "olora"}, 'model.lora.adapter_path: "F": the adapters in F belong to weights that '),
        ({"init_lora_weights": "gaussian"}, None),
        (
            {"alpha_pattern": {"q_proj": 64}},
            'model.lora.adapter_path: "F": the adapters in F have rank 4 and alpha 64 of ',
        ),
        (None, 'model.lora.adapter_path: "F": there is no adapter_config.json in it; give the folder of an adapter '),
        ({}, None),
    ],
)
def test_adapters_to_begin_with_are_the_sections(
    tmp_path: Path, content: dict[str, object] | None, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("F").mkdir()
    if content is not None:
        Path("F/adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 16, "bias": "none"} | content))
    words = ["model.lora.rank=4", "model.lora.adapter_path=F"]
    problems = check_experiment(load_experiment(write_experiment(tmp_path), words))
    errors = [problem.text() for problem in problems if problem.severity is Severity.ERROR]
    assert len(errors) == (told is not None)
    assert told is None or errors[0].startswith(told)


ATTENTION = ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"]
EXPERTS = [f"model.layers.0.mlp.experts.{expert}.{part}_proj" for expert in (0, 11) for part in ("gate", "up", "down")]


@pytest.mark.parametrize(
    ("modules", "patterns", "told"),
    [
        (ATTENTION, {"alpha_pattern": {"q_proj": 64}}, "rank 4 and alpha 64 of model.layers.0.self_attn.q_proj"),
        (ATTENTION, {"rank_pattern": {r".*\.v_proj": 8}}, "rank 8 and alpha 16 of model.layers.0.self_attn.v_proj"),
        # The same factor, with tensors of another rank.
        (ATTENTION, {"rank_pattern": {"v_proj": 8}, "alpha_pattern": {"v_proj": 32}}, "rank 8 and alpha 32 of "),
        (ATTENTION, {"alpha_pattern": {"q_proj": 16}, "rank_pattern": {"v_proj": 4}}, None),
        (ATTENTION, {"alpha_pattern": {"k_proj": 64, "proj": 64, "layers.1.self_attn.q_proj": 64}}, None),
        # The first key that names a module decides, as in PEFT.
        (ATTENTION, {"alpha_pattern": {"self_attn.q_proj": 16, "q_proj": 64}}, None),
        (EXPERTS, {"alpha_pattern": {r".*\.experts\.gate_up_proj": 32}}, "rank 4 and alpha 32 of "),
        (EXPERTS, {"alpha_pattern": {r".*\.experts\.down_proj": 8}}, "rank 4 and alpha 8 of "),
        (EXPERTS, {"alpha_pattern": {r"experts\.gate_up_proj": 32}, "rank_pattern": {r"experts\.gate_up_proj": 8}}, None),
    ],
)  # fmt: skip
def test_patterns_leave_adapters_what_the_section_says(
    tmp_path: Path, modules: list[str], patterns: dict[str, object], told: str | None
) -> None:
    tensors = {
        f"base_model.model.{module}.lora_{matrix}.weight": torch.zeros(1) for module in modules for matrix in "AB"
    }
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 16} | patterns))
    problems = adapter_problems("model.lora", LoraConfig(rank=4), str(tmp_path))
    assert len(problems) == (told is not None)
    assert told is None or (
        f"have {told}" in problems[0].reason and problems[0].remedy.startswith("merge them with PEFT")
    )


def test_our_own_patterns_of_experts_are_accepted(tmp_path: Path) -> None:
    family = FAMILIES["qwen3_moe"]
    spec = ModelSpec(family, family.shape(MOE), tmp_path, dict(MOE))
    moe, lora = weight_map(MOE), LoraConfig(rank=3, alpha=6)
    targets = adapter_targets(moe, lora.target_modules)
    config = peft_config(spec, lora, targets, "lm")
    assert config["rank_pattern"] and config["alpha_pattern"]
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file(
        {name: torch.zeros(1) for name in adapter_map(moe, targets, lora, "lm").tensors},
        tmp_path / "adapter_model.safetensors",
    )
    assert adapter_problems("model.lora", lora, str(tmp_path)) == []


@pytest.mark.parametrize("with_reference", ["actor.use_kl_loss=true", "trainer.kind=dpo"])
def test_a_reference_that_is_not_the_start_is_told(tmp_path: Path, with_reference: str) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 16}')

    def told(*words: str) -> list[Problem]:
        words = ("model.lora.rank=4", f"model.lora.adapter_path={tmp_path}", *words)
        problems = check_experiment(load_experiment(write_experiment(tmp_path), words))
        return [problem for problem in problems if problem.path == "model.lora.adapter_path"]

    (problem,) = told(with_reference)
    assert problem.severity is Severity.WARNING and "the reference is the model without adapters" in problem.reason
    assert problem.remedy.startswith("set ref.path to the merged model")
    assert told(with_reference, f"ref.path={tmp_path}/model") == told() == []


@pytest.mark.parametrize(("setting", "way_out"), [("type=dora", "set it to lora"), ("dropout=0.1", "set it to 0")])
def test_experts_have_plain_adapters_alone(tmp_path: Path, setting: str, way_out: str) -> None:
    file = write_experiment(tmp_path, model_type="qwen3_moe", num_experts=4, moe_intermediate_size=8)
    words = ["model.lora.rank=4", f"model.lora.{setting}"]
    key, _, value = setting.partition("=")
    (problem,) = (one for one in check_experiment(load_experiment(file, words)) if one.path == f"model.lora.{key}")
    assert problem.severity is Severity.ERROR and problem.remedy.startswith(f"{way_out}, or name projections")
    attention = check_experiment(load_experiment(file, [*words, 'model.lora.target_modules=["*.self_attn.*"]']))
    assert not [one for one in attention if one.path == f"model.lora.{key}"]
    moe, lora = weight_map(MOE), LoraConfig.model_validate({"rank": 4, key: value})
    refuse_kinds_for_experts(moe, adapter_targets(moe, ["*.self_attn.*"]), lora, "critic.lora")
    with pytest.raises(ConfigError, match=rf"critic\.lora\.{key}: .*target_modules name .*up_proj, .*{way_out}"):
        refuse_kinds_for_experts(moe, adapter_targets(moe, ["up_proj"]), lora, "critic.lora")


def test_every_expert_has_an_adapter_of_its_own() -> None:
    """Layer 1 of 4 experts of 4 rows: B's rows are cut over expert TP ranks, A's columns of the down projection."""
    moe, lora = weight_map(MOE), LoraConfig(rank=3, target_modules=("up_proj", "down_proj"))
    mapped = adapter_map(moe, adapter_targets(moe, lora.target_modules), lora, "lm")
    rules, peft = mapped.by_parameter(), "base_model.model.model.layers.1.mlp.experts.2."
    assert len(mapped.tensors) == 2 * 4 * 2 * 2
    prefix = "decoder.layers.1.mlp.experts_weight"
    b, a = rules[f"{prefix}1_lora.lora_B.up_proj"].of_expert(2), rules[f"{prefix}2_lora.lora_A.down_proj"].of_expert(2)
    assert b.axis == 0 and b.shard(2, 1) == (Segment(f"{peft}up_proj.lora_B.weight", 2, 2),)
    assert a.axis == 1 and a.shard(2, 1) == (Segment(f"{peft}down_proj.lora_A.weight", 2, 2),)
    whole = rules[f"{prefix}1_lora.lora_A.up_proj"], rules[f"{prefix}2_lora.lora_B.down_proj"]
    assert all(rule.axis is None and rule.experts == 4 for rule in whole)


def test_experts_are_named_as_their_family_names_them() -> None:
    """Mixtral's three; a dense layer among others is no other choice of projections."""
    mixtral = weight_map(DENSE | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2})
    assert short_names(adapter_targets(mixtral, ["w?"])) == ["w1", "w2", "w3"]
    dense_first = weight_map(MOE | {"mlp_only_layers": [0]})
    names = [target.adapter for target in adapter_targets(dense_first, ["down_proj"])]
    assert names == ["decoder.layers.0.mlp.linear_fc2_lora", "decoder.layers.1.mlp.experts_weight2_lora"]
    with pytest.raises(ConfigError, match="other projections in one layer than in another"):
        adapter_targets(weight_map(MOE), ["*.layers.1.mlp.experts.*"])


def test_a_shared_expert_is_named_as_parameters_in_the_file() -> None:
    shared = weight_map(MOE | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 6})
    named = peft_targets(shared, adapter_targets(shared, ["*.mlp.shared_expert.*", "q_proj"]))
    assert named.modules == ["q_proj"] and not named.has_experts
    assert named.parameters == [f"mlp.shared_expert.{part}_proj.weight" for part in ("down", "gate", "up")]
    every = peft_targets(shared, adapter_targets(shared, ["all-linear"]))
    assert every.modules == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert every.parameters == ["experts.gate_up_proj", "experts.down_proj", *named.parameters]


def test_a_projection_that_is_two_blocks_of_its_layer_has_one_b_in_the_file() -> None:
    """Rows 0 to 3 and 4 to 7 of one projection, as two parameters, each cut over two ranks."""
    whole = WeightMap(
        {"model.layers.0.mlp.gate_up_proj.weight": (8, 4)},
        (Rule(("decoder.layers.0.mlp.linear_fc1.weight",), 0, tuple(
            (Segment("model.layers.0.mlp.gate_up_proj.weight", start, 4),) for start in (0, 4)
        )),),
    )  # fmt: skip
    lora = LoraConfig(rank=2)
    mapped = adapter_map(whole, adapter_targets(whole, lora.target_modules), lora, "lm")
    expected = torch.arange(16.0).view(8, 2)
    tensors: dict[str, torch.Tensor] = {}
    for number in range(2):
        (rule,) = (rule for rule in mapped.rules if rule.names[0].endswith(f"lora_B.{number}"))
        put_rows(tensors, rule, list(expected[4 * number :][:4].chunk(2)), mapped)
    assert torch.equal(tensors["base_model.model.model.layers.0.mlp.gate_up_proj.lora_B.weight"], expected)
