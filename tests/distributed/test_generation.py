"""The native engine on DP2 (each rank for itself), TP2, TP2 with SP, and PP2, against Hugging Face and each other."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.model_cases import YARN
from tests.support.ranks import run_ranks
from tests.support.tiny_models import FAMILY_NAMES, VARIED_SETTINGS, FamilyName, tiny_model

LAYOUTS = {"tp1": (), "tp2": ("--tp", 2), "tp2 sp": ("--tp", 2, "--sp"), "pp2": ("--pp", 2)}
EXPERTS: tuple[FamilyName, ...] = ("qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3")
LATENT: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"q_lora_rank": None, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {"rope_parameters": YARN | {"mscale": 0.7}},
}
MODELS = (*FAMILY_NAMES, *VARIED_SETTINGS, "odd", *EXPERTS)
NUM_PROMPTS = 16


def ragged_prompts(seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 40, (NUM_PROMPTS,), generator=generator).tolist()
    return [torch.randint(3, 128, (length,), generator=generator).tolist() for length in lengths]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder a model, with its prompts. `odd`: one KV head, tied, and a vocabulary that needs padding."""
    folder = tmp_path_factory.mktemp("models")
    for number, family in enumerate((*FAMILY_NAMES, *EXPERTS, *VARIED_SETTINGS)):
        settings = VARIED_SETTINGS.get(family) or LATENT.get(family, {})
        tiny_model(folder / family, family, seed=number, **settings)
    tiny_model(folder / "odd", "llama", seed=7, tied=True, vocab_size=131, num_kv_heads=1)
    for number, name in enumerate(MODELS):
        prompts = ragged_prompts(number)[: 6 if name in VARIED_SETTINGS or name in LATENT else NUM_PROMPTS]
        (folder / name / "prompts.json").write_text(json.dumps(prompts))
    return folder


@pytest.fixture(scope="module")
def hf(models: Path) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    return {
        name: AutoModelForCausalLM.from_pretrained(models / name, attn_implementation="eager").eval() for name in MODELS
    }


@pytest.fixture(scope="module")
def results(models: Path) -> dict[str, Any]:
    """What the program wrote, by layout."""
    return {
        name: run_ranks("tests.distributed.programs.generation", models, *flags, nproc=2)
        for name, flags in LAYOUTS.items()
    }


@pytest.mark.parametrize("model", MODELS)
def test_greedy_tokens_equal_hugging_faces(model: str, models: Path, hf: dict[str, Any], results: dict[str, Any]):
    expected = []
    for prompt in json.loads((models / model / "prompts.json").read_text()):
        output = hf[model].generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)
        expected.append(output[0, len(prompt) :].tolist())
    for layout in LAYOUTS:
        assert results[layout]["families"][model]["greedy"] == expected, layout


@pytest.mark.parametrize("model", MODELS)
def test_log_probs_equal_the_recomputed_ones(model: str, results: dict[str, Any]):
    for layout in LAYOUTS:
        result = results[layout]["families"][model]
        assert result["greedy_difference"] < 1e-4, layout
        assert result["sampled_difference"] < 1e-4, layout


@pytest.mark.parametrize("model", MODELS)
def test_sampled_tokens_are_the_same_on_every_layout_and_rank(model: str, results: dict[str, Any]):
    for layout in LAYOUTS:
        result = results[layout]["families"][model]
        assert result["sampled"] == results["tp1"]["families"][model]["sampled"], layout
        assert result["ranks_agree"], layout
        assert result["text_is_decoded"], layout


def test_tokens_do_not_depend_on_the_company(results: dict[str, Any]):
    together = results["tp1"]["independence"]["together"]
    for layout in LAYOUTS:
        result = results[layout]["independence"]
        assert result["together"] == result["backwards"] == together, layout
        assert result["one_slot"] == together[:5], layout
        assert result["alone"] == together[:2], layout
        assert result["among_copies"] == [together[3], together[5]], layout
        # Eight responses to one prompt, of up to 8 tokens at temperature 1: no two alike.
        assert len({tuple(copy) for copy in result["copies"]}) == 8, layout


def chi_square_p(counts: list[int], probabilities: torch.Tensor) -> float:
    """P(a sample from `probabilities` fits as badly as `counts`); tokens expected under 5 times are taken together."""
    observed, expected = torch.tensor(counts, dtype=torch.float64), probabilities * sum(counts)
    assert observed[expected == 0].sum() == 0, "a token of probability 0 was drawn"
    rare = expected < 5
    bins = ~rare
    observed = torch.cat([observed[bins], observed[rare].sum()[None]])
    expected = torch.cat([expected[bins], expected[rare].sum()[None]])
    kept = expected > 0
    statistic = ((observed[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    degrees = torch.tensor(int(kept.sum()) - 1, dtype=torch.float64)
    return torch.special.gammaincc(degrees / 2, statistic / 2).item()


def restrict(probabilities: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """By hand: the `top_k` largest, renormalised, then as many of them as reach `top_p`."""
    order = sorted(range(len(probabilities)), key=lambda token: -probabilities[token].item())[:top_k]
    total = sum(probabilities[token].item() for token in order)
    kept, mass = [], 0.0
    for token in order:
        kept.append(token)
        mass += probabilities[token].item() / total
        if mass >= top_p:
            break
    result = torch.zeros_like(probabilities)
    result[kept] = probabilities[kept] / probabilities[kept].sum()
    return result


def test_first_tokens_follow_the_softmax(models: Path, hf: dict[str, Any], results: dict[str, Any]):
    prompt = json.loads((models / "llama" / "prompts.json").read_text())[3]
    with torch.no_grad():
        logits = hf["llama"](torch.tensor([prompt])).logits[0, -1].double()
    softmax = logits.softmax(0)
    for layout in LAYOUTS:
        counts = results[layout]["distribution"]
        assert chi_square_p(counts["plain"], softmax) > 0.001, layout
        assert chi_square_p(counts["restricted"], restrict((logits / 0.7).softmax(0), 30, 0.8)) > 0.001, layout
        # The test can fail: it tells draws at temperature 1 from the softmax at 0.7.
        assert chi_square_p(counts["plain"], (logits / 0.7).softmax(0)) < 0.001, layout


def letters(token_ids: list[int]) -> str:
    return "".join(chr(0x100 + token) for token in token_ids if token > 2)


def cut(plain: list[list[Any]], is_end: Callable[[list[int]], bool]) -> list[list[Any]]:
    """Responses `plain`, each cut after its shortest prefix that is an end; in full where none is."""
    responses = []
    for tokens, _, _, _ in plain:
        length = next((length for length in range(1, len(tokens) + 1) if is_end(tokens[:length])), None)
        kept = tokens[:length]
        responses.append([kept, "length" if length is None else "stop", letters(kept), len(kept)])
    return responses


def test_responses_end_where_they_should(results: dict[str, Any]):
    result = results["tp1"]["endings"]
    plain, eos, stop = result["plain"], result["eos_id"], result["stop_string"]
    assert [(len(tokens), reason) for tokens, reason, _, _ in plain] == [(12, "length")] * 4
    assert result["eos"] == cut(plain, lambda tokens: tokens[-1] in (2, eos))
    assert result["stop_token"] == cut(plain, lambda tokens: tokens[-1] == eos)
    assert result["stopped"] == cut(plain, lambda tokens: stop in letters(tokens))
    assert result["eos_ignored"] == plain
    assert result["short"] == [[tokens[:3], "length", letters(tokens[:3]), 3] for tokens, _, _, _ in plain]
    # Each ending was met: the second response has the stop string, the first the end token.
    assert result["stopped"][1][1] == result["eos"][0][1] == "stop"
    for layout in LAYOUTS:
        assert results[layout]["endings"] == result, layout


def test_padding_of_the_vocabulary_is_never_drawn(results: dict[str, Any]):
    for layout in LAYOUTS:
        # Nearly uniform over 131 tokens, 640 draws; the padding of zero weights would be 61 columns of 192.
        assert max(results[layout]["hot"]) <= 130, layout
        assert len(results[layout]["hot"]) > 115, layout


def test_the_model_and_the_random_state_are_left_alone(results: dict[str, Any]):
    for layout in LAYOUTS:
        result = results[layout]["left_alone"]
        assert result["error"] == "RuntimeError: the tokenizer broke", layout
        for promise in ("modules_are_back", "is_training_again", "forward_is_as_before", "generation_is_as_before"):
            assert result[promise], (layout, promise)
        assert result["rng_untouched"], layout
        done = [count for count, _ in result["progress"]]
        assert done == sorted(set(done)), layout
        assert result["progress"][-1] == [NUM_PROMPTS, NUM_PROMPTS], layout


def test_requests_that_cannot_be_answered_are_refused(results: dict[str, Any]):
    expected = {
        "empty": "DataError: prompt 1 has no tokens; the model needs at least one to start from",
        "too long": "DataError: prompt 1 has 500 tokens, with max_tokens 13 over the model's 512 positions; "
        "at most 499 prompt tokens fit",
        "unknown token": "DataError: prompt 1 has token 131, the model's vocabulary ends at 130; "
        "use the tokenizer that belongs to the model",
        "no tokens": "ConfigError: sampling max_tokens: 0 can't be; it has to be at least 1",
        "top_p": "ConfigError: sampling top_p: 0.0 can't be; it has to be over 0 and at most 1 (off)",
        "not finite": "FloatingPointError: the model's logits for request 0 are not finite: its weights are broken",
    }
    for layout in LAYOUTS:
        assert results[layout]["refusals"] == expected, layout


def test_it_decodes_with_the_training_weights_themselves(models: Path, hf: dict[str, Any], results: dict[str, Any]):
    total = sum(parameter.nbytes for parameter in hf["llama"].parameters())
    for layout in ("tp2", "tp2 sp", "pp2"):
        result = results[layout]["in_place"]
        assert result["wrapped"] == results["tp1"]["families"]["llama"]["greedy"], layout
        assert result["moved"] == 0, layout
        # A rank's shard: half of the matrices, and under TP all of the norms (5 of 32 float32).
        replicated = 5 * 32 * 4 if layout.startswith("tp2") else 0
        expected = (total + replicated) / 2
        assert abs(result["aliased"] - expected) <= (0 if replicated else 32 * 4 / 2), layout
        assert result["changed"], layout
        assert result["difference"] < 1e-4, layout
