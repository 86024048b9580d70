"""What tools/make_demo.py makes: additions by arithmetic, a tokenizer and a model that transformers loads, the
cache."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tools import load_tool

make_demo = load_tool("make_demo")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out: Path = tmp_path_factory.mktemp("demo") / "assets"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, ROOT / "tools/make_demo.py", "--out", out]
    subprocess.run(command, check=True, env=environment)
    return out


def rows(assets: Path, name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (assets / "data" / f"{name}.jsonl").read_text().splitlines()]


def pair_of(prompt: str) -> tuple[int, int]:
    first, second = prompt.removesuffix("=").split("+")
    return int(first), int(second)


def test_forgotten_carries_by_hand() -> None:
    assert [make_demo.sum_without_carry(pair) for pair in ((27, 15), (57, 68), (9, 1), (99, 99))] == [32, 115, 0, 188]
    assert [make_demo.has_carry(pair) for pair in ((27, 15), (20, 79), (9, 1), (95, 4))] == [True, False, True, False]


def test_held_out_pairs_are_nowhere_in_training(assets: Path) -> None:
    held_out = {pair_of(row["prompt"]) for row in rows(assets, "val")}
    swapped = {(b, a) for a, b in held_out}
    train = {pair_of(row["prompt"]) for row in rows(assets, "train")}
    warm_start = {pair_of(row["prompt"]) for row in rows(assets, "warm_start")}
    assert len(held_out) == 500
    assert train == warm_start
    assert not train & (held_out | swapped)
    # Nothing is lost: training and held-out pairs with their swapped forms are all pairs of two non-round numbers.
    numbers = [10 * tens + ones for tens in range(1, 10) for ones in range(1, 10)]
    assert train | held_out | swapped == {(a, b) for a in numbers for b in numbers}


def test_answers_are_sums_and_wrong_responses_forget_a_carry(assets: Path) -> None:
    for row in rows(assets, "val") + rows(assets, "train"):
        assert int(row["answer"]) == sum(pair_of(row["prompt"]))
    with_carry = wrong = 0
    for row in rows(assets, "warm_start"):
        a, b = pair_of(row["prompt"])
        error = a + b - int(row["response"])
        with_carry += a % 10 + b % 10 >= 10
        wrong += error != 0
        assert error == 0 or (error == 10 and a % 10 + b % 10 >= 10)
    # 45 of the 81 pairs of ones from 1 to 9 carry; 70% of those answers forget it. Within three standard deviations.
    pairs = len(rows(assets, "warm_start"))
    assert abs(with_carry / pairs - 45 / 81) < 0.02
    assert abs(wrong / with_carry - 0.7) < 0.023


def test_tokenizer_keeps_text_and_digits(assets: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(assets / "model", local_files_only=True)
    for text in ("37+45=", "82", " 1 + 2 = 3", "à bientôt\n7", "ten"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    digits = [tokenizer.encode(digit, add_special_tokens=False) for digit in "0123456789"]
    assert all(len(ids) == 1 for ids in digits)
    assert tokenizer.encode("37") == [tokenizer.bos_token_id, *digits[3], *digits[7]]
    response = [*digits[8], *digits[2], tokenizer.eos_token_id]
    assert tokenizer.decode(response, skip_special_tokens=True) == "82"
    assert tokenizer.chat_template is None
    assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3


def test_model_is_small_and_shards_over_two_ranks(assets: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(assets / "model")
    config = model.config
    assert 1e6 <= sum(parameter.numel() for parameter in model.parameters()) <= 3e6
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    sizes = (config.num_attention_heads, config.num_key_value_heads, config.intermediate_size, config.num_hidden_layers)
    assert all(size % 2 == 0 for size in sizes)
    assert config.head_dim in (32, 64)  # sizes that vLLM's CPU attention takes


def test_assets_are_made_once_for_each_recipe(assets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (assets / "model/model.safetensors").stat().st_mtime_ns
    assert make_demo.main(["--out", str(assets)]) == 0
    assert "already made" in capsys.readouterr().out
    assert (assets / "model/model.safetensors").stat().st_mtime_ns == before
    assert not make_demo.is_made(assets, make_demo.Recipe(seed=1))
    assert not make_demo.is_made(assets / "model", make_demo.Recipe())
