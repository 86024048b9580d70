"""The native engine in generation layouts of its own, on four ranks, against Hugging Face and the training layout."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.model_cases import YARN, scaled_gemma3
from tests.support.ranks import run_ranks
from tests.support.tiny_models import VARIED_SETTINGS, FamilyName, tiny_model

VARIED: tuple[FamilyName, ...] = ("phi3", "glm4", "gemma2", "gemma3_text")
MODELS = ("llama", "qwen2", "qwen3", "odd", "qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", *VARIED)
NUM_PROMPTS = 7
NEW_TOKENS = 6


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder a model, with its prompts. `odd`: one KV head, tied, biased, and a vocabulary that needs padding.
    Gemma 3 has one KV head, and a scaled RoPE in its full layers."""
    folder = tmp_path_factory.mktemp("models")
    tiny_model(folder / "llama", "llama", tied=True)
    tiny_model(folder / "qwen2", "qwen2", seed=1)
    tiny_model(folder / "qwen3", "qwen3", seed=2, head_dim=16)
    tiny_model(folder / "odd", "qwen2", seed=3, tied=True, vocab_size=131, num_kv_heads=1)
    tiny_model(folder / "qwen2_moe", "qwen2_moe", seed=4)
    tiny_model(folder / "qwen3_moe", "qwen3_moe", seed=5, num_layers=4, mlp_only_layers=[1], norm_topk_prob=True)
    tiny_model(folder / "mixtral", "mixtral", seed=6)
    tiny_model(folder / "deepseek_v2", "deepseek_v2", seed=20, q_lora_rank=None, topk_method="group_limited_greedy")
    tiny_model(folder / "deepseek_v3", "deepseek_v3", seed=21, rope_parameters=YARN)
    for number, family in enumerate(VARIED, start=7):
        num_kv_heads, settings = (1, scaled_gemma3()) if family == "gemma3_text" else (2, VARIED_SETTINGS[family])
        tiny_model(folder / family, family, seed=number, num_kv_heads=num_kv_heads, **settings)
    generator = torch.Generator().manual_seed(0)
    for name in MODELS:
        lengths = torch.randint(1, 30, (NUM_PROMPTS,), generator=generator).tolist()
        prompts = [torch.randint(3, 128, (length,), generator=generator).tolist() for length in lengths]
        (folder / name / "prompts.json").write_text(json.dumps(prompts))
    return folder


@pytest.fixture(scope="module")
def expected(models: Path) -> dict[str, list[tuple[list[int], list[float]]]]:
    """Hugging Face's greedy tokens with their log-probs, by model and prompt."""
    from transformers import AutoModelForCausalLM

    answers: dict[str, Any] = {}
    for name in MODELS:
        model = AutoModelForCausalLM.from_pretrained(models / name, attn_implementation="eager").eval()
        model.generation_config.eos_token_id = None
        answers[name] = []
        for prompt in json.loads((models / name / "prompts.json").read_text()):
            ids = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW_TOKENS)
            with torch.no_grad():
                rows = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            response = ids[0, len(prompt) :]
            answers[name].append((response.tolist(), rows.gather(1, response[:, None])[:, 0].tolist()))
    return answers


@pytest.fixture(scope="module")
def results(models: Path) -> dict[str, Any]:
    return run_ranks("tests.distributed.programs.native_layout", models, nproc=4, timeout=900)


def assert_equal(got: list[Any], wanted: list[Any]) -> None:
    """The same tokens, and log-probs to float32's precision."""
    assert wanted
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in wanted]
    for (_, ours), (_, theirs) in zip(got, wanted, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


def switches(results: dict[str, Any]) -> dict[str, Any]:
    return {name: result for name, result in results.items() if name != "cut"}


@pytest.mark.parametrize("model", MODELS)
def test_pieces_cut_anywhere_give_hugging_faces_tokens(model: str, expected: dict[str, Any], results: dict[str, Any]):
    for size, by_model in results["cut"].items():
        assert by_model[model]["most_pieces"] >= 3, size
        for got in by_model[model]["greedy"]:
            assert_equal(got, expected[model])
        for got in by_model[model]["sampled"]:
            assert_equal(got, results["cut"]["1"][model]["sampled"][0])


def test_every_layout_gives_hugging_faces_tokens(expected: dict[str, Any], results: dict[str, Any]):
    assert len(switches(results)) > 10
    for name, result in switches(results).items():
        assert len(result["greedy"]) >= 1, name
        for got in result["greedy"]:
            assert_equal(got, expected[name.split(": ")[1]])


def test_a_later_switch_brings_the_later_weights(expected: dict[str, Any], results: dict[str, Any]):
    direct = {
        name.split(": ")[1]: result["direct"][0] for name, result in switches(results).items() if "direct" in result
    }
    assert len(direct) > 4
    for name, result in switches(results).items():
        model = name.split(": ")[1]
        # Where no engine decodes on the training shards themselves, all layouts have to agree on other tokens.
        wanted = direct.setdefault(model, result["changed"][0])
        assert wanted[0][1] != pytest.approx(expected[model][0][1], abs=1e-4), name
        for got in result["changed"]:
            assert_equal(got, wanted)


def test_it_generates_in_its_turn_only(results: dict[str, Any]):
    for result in switches(results).values():
        assert result["too_early"] == result["too_late"]
        assert result["too_early"].startswith("generate was called while training has its turn")


def test_replicas_are_strided_over_the_training_layout(results: dict[str, Any]):
    assert results["tp2 dp2 to 1: odd"]["replicas"] == [[0], [1], [2], [3]]
    assert results["tp4 sp to 2: odd"]["replicas"] == [[0, 2], [1, 3]]
    # Places follow the training shards: ranks 0 and 2 hold the first half of the rows, 1 and 3 the second.
    assert results["tp2 dp2 to 4: odd"]["replicas"] == [[0, 2, 1, 3]]
    assert results["tp2 pp2 to 4: odd"]["replicas"] == [[0, 2, 1, 3]]


def test_no_byte_is_held_twice(results: dict[str, Any]):
    for name, result in switches(results).items():
        # Everything is the training shard's own memory, or received into memory of the generation shard.
        assert result["held"] == result["received"], name
        assert result["aliased"] <= result["shard"], name
    same = results["tp4 sp to 4: odd"]
    assert (same["received"], same["aliased"]) == (0, same["shard"])
