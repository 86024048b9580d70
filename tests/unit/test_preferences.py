"""Losses of preference pairs against float64 arithmetic, and pairs as token ids."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megappo.algorithms.preferences import bradley_terry_loss, dpo_loss
from megappo.config.data import DataConfig
from megappo.data.conversation import ConversationEncoder
from megappo.data.preferences import load_preferences
from megappo.data.tokenizer import Tokenizer, load_tokenizer
from megappo.errors import ConfigError, DataError
from megappo.experience.sample import Prompt
from megappo.workers.scores import score_place, scored_batch
from tests.support.tokenizers import char_ids, save_tokenizer
from tests.support.tools import load_tool

# (log π chosen, rejected, log π_ref chosen, rejected)
PAIRS = [
    (-10.0, -14.0, -11.0, -12.0),
    (-20.0, -9.0, -15.0, -15.0),
    (-3.0, -3.0, -3.0, -3.0),
    (-500.0, 0.0, 0.0, -500.0),
]


def softplus(x: float) -> float:
    """log(1 + eˣ), without overflow."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


@pytest.mark.parametrize("beta", [0.1, 0.5])
@pytest.mark.parametrize(("loss_type", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.1), ("ipo", 0.0)])
def test_dpo_values_and_gradients(beta: float, loss_type: str, smoothing: float) -> None:
    columns = [torch.tensor(column, dtype=torch.float32) for column in zip(*PAIRS, strict=True)]
    chosen, rejected = columns[0].requires_grad_(), columns[1].requires_grad_()
    loss = dpo_loss(chosen, rejected, *columns[2:], beta=beta, loss_type=loss_type, label_smoothing=smoothing)
    loss.per_pair.sum().backward()
    for index, (c, r, ref_c, ref_r) in enumerate(PAIRS):
        h = (c - ref_c) - (r - ref_r)
        if loss_type == "ipo":
            expected, slope = (h - 1 / (2 * beta)) ** 2, 2 * (h - 1 / (2 * beta))
        else:
            expected = (1 - smoothing) * softplus(-beta * h) + smoothing * softplus(beta * h)
            sigmoid = 1 / (1 + math.exp(min(-beta * h, 700)))
            slope = -(1 - smoothing) * beta * (1 - sigmoid) + smoothing * beta * sigmoid
        assert float(loss.per_pair.detach()[index]) == pytest.approx(expected, rel=1e-6)
        assert float(chosen.grad[index]) == pytest.approx(slope, rel=1e-5, abs=1e-9)  # type: ignore[index]
        assert float(rejected.grad[index]) == pytest.approx(-slope, rel=1e-5, abs=1e-9)  # type: ignore[index]
        assert float(loss.margin[index]) == pytest.approx(beta * h, rel=1e-6)
        assert float(loss.chosen[index]) == pytest.approx(beta * (c - ref_c), rel=1e-6)
    assert loss.accuracy.tolist() == [1.0, 0.0, 0.5, 0.0]


def test_bradley_terry() -> None:
    chosen = torch.tensor([1.0, -2.0, 0.0, 300.0], requires_grad=True)
    rejected = torch.tensor([0.0, 1.0, 0.0, -300.0])
    loss = bradley_terry_loss(chosen, rejected)
    loss.per_pair.sum().backward()
    assert loss.per_pair.tolist() == pytest.approx([softplus(-1.0), softplus(3.0), math.log(2), 0.0])
    expected = [-1 / (1 + math.e), -1 / (1 + math.exp(-3)), -0.5, 0.0]
    assert chosen.grad.tolist() == pytest.approx(expected)  # type: ignore[union-attr]
    assert loss.accuracy.tolist() == [1.0, 0.0, 0.5, 1.0]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(save_tokenizer(tmp_path_factory.mktemp("plain"), add_bos=True, add_eos=True))


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(save_tokenizer(tmp_path_factory.mktemp("chat"), chat=True, add_bos=True))


def config(path: Path, **settings: Any) -> DataConfig:
    defaults: dict[str, Any] = {"train_batch_size": 1, "max_prompt_length": 64, "max_response_length": 8}
    return DataConfig(train_files=(str(path),), **defaults | settings)


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def turn(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


CALL: dict[str, Any] = {"tool_calls": [{"name": "add"}]}


def test_pairs_of_strings(tmp_path: Path, plain: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    file = write(
        tmp_path / "pairs.jsonl",
        {"prompt": "1+1=", "chosen": "2", "rejected": "11", "answer": 2},
        {"prompt": "2+2=", "chosen": "4", "rejected": "4"},
    )
    (pair,) = load_preferences(config(file), plain, [str(file)])
    assert pair.prompt.token_ids == (1, *char_ids("1+1="))
    assert (pair.chosen_ids, pair.rejected_ids) == ((*char_ids("2"), 2), (*char_ids("11"), 2))
    assert (pair.chosen, pair.rejected, pair.prompt.answer) == ("2", "11", "2")
    assert pair.prompt.messages == (turn("user", "1+1="),)
    assert "left out 1 pairs of two equal responses, and 0 with a response of over 8 tokens" in caplog.text


def test_pairs_of_messages(tmp_path: Path, chat: Tokenizer) -> None:
    """Responses as one turn, as whole conversations, and without the prompt's system turn."""
    prompt = [turn("system", "sum"), turn("user", "1+1=")]
    rows = [
        {"prompt": prompt, "chosen": [turn("assistant", "2")], "rejected": [*prompt, turn("assistant", "11")]},
        {"prompt": prompt, "chosen": [prompt[1], turn("assistant", "2")], "rejected": "11"},
    ]
    file = write(tmp_path / "pairs.jsonl", *rows)
    for pair in load_preferences(config(file), chat, [str(file)]):
        assert pair.prompt.token_ids == tuple(char_ids("[system]sum[user]1+1=[assistant]"))
        assert (pair.chosen_ids, pair.rejected_ids) == ((*char_ids("2"), 2), (*char_ids("11"), 2))


def test_prompt_turns_in_a_response_are_the_prompts_with_their_calls(tmp_path: Path, chat: Tokenizer) -> None:
    calls = [turn("user", "1+1="), turn("assistant", "") | CALL, turn("user", "so")]
    nulls = [one | {"name": None} for one in calls]
    nulls[1] = turn("assistant", "") | {"tool_calls": [{"name": "add", "id": None}]}  # as another row has it in Parquet
    file = write(
        tmp_path / "pairs.jsonl",
        {"prompt": calls, "chosen": [*nulls, turn("assistant", "2")], "rejected": [*calls, turn("assistant", "3")]},
    )
    (pair,) = load_preferences(config(file), chat, [str(file)])
    assert (pair.chosen, pair.rejected, pair.prompt.messages) == ("2", "3", tuple(calls))
    other = [calls[0], turn("assistant", ""), calls[2], turn("assistant", "2")]
    write(file, {"prompt": calls, "chosen": other, "rejected": "3"})
    with pytest.raises(DataError, match="after the turns of the prompt exactly as they stand there"):
        load_preferences(config(file), chat, [str(file)])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "pairs.jsonl:1: no column 'rejected'; the columns are 'prompt', 'chosen'"),
        ({"prompt": "a", "chosen": None, "rejected": "b"}, "pairs.jsonl:1: column 'chosen' is null"),
        ({"prompt": "a", "chosen": 3, "rejected": "b"}, "'chosen' must be a string or a list of messages"),
        (
            {"prompt": "a", "chosen": [turn("user", "b")], "rejected": "b"},
            "'chosen' must be a string or one assistant's",
        ),
        (
            {"prompt": "a", "chosen": [turn("user", "x"), turn("assistant", "b")], "rejected": "b"},
            "after the turns of the prompt exactly as they stand there",
        ),
        (
            {"prompt": "a", "chosen": [turn("assistant", "b") | CALL], "rejected": "b"},
            "'chosen' is an assistant's turn with tool_calls; write it as a string",
        ),
        ({"prompt": "a", "chosen": "b" * 8, "rejected": "b"}, "the response has 9 tokens with its end token"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "nothing is left after filtering"),
    ],
)
def test_rows_that_are_no_pairs(tmp_path: Path, plain: Tokenizer, row: dict[str, Any], message: str) -> None:
    file = write(tmp_path / "pairs.jsonl", row)
    with pytest.raises(DataError) as error:
        load_preferences(config(file), plain, [str(file)])
    assert message in str(error.value)


def test_a_pair_with_a_long_response_is_filtered(tmp_path: Path, plain: Tokenizer) -> None:
    rows = [{"prompt": "a", "chosen": "b" * 8, "rejected": "b"}, {"prompt": "a", "chosen": "b", "rejected": "c"}]
    file = write(tmp_path / "pairs.jsonl", *rows)
    (pair,) = load_preferences(config(file, overlong_prompts="filter"), plain, [str(file)])
    assert pair.rejected == "c"


def test_conversations_are_encoded_with_the_reward_models_own_template(
    plain: Tokenizer, chat: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = Prompt(0, "made", (9, 9), "as the actor reads it", messages=(turn("user", "1+1="),))
    rendered = ConversationEncoder(chat, None, "x").encode([prompt], ["2"], [True])
    assert rendered == [char_ids("[user]1+1=[assistant]2")]
    encoder = ConversationEncoder(plain, None, "x")
    assert encoder.encode([prompt, prompt], ["2", "2"], [True, False]) == [
        [1, *char_ids("1+1=2"), 2],
        [1, *char_ids("1+1=2")],
    ]
    template = "{% for m in messages %}{{ m.content or m.tool_calls[0].name }}.{% endfor %}"
    monkeypatch.setattr(chat._backend, "chat_template", template)
    called = dataclasses.replace(prompt, messages=(turn("user", "1"), {"role": "assistant"} | CALL, turn("user", "2")))
    assert ConversationEncoder(chat, None, "x").encode([called], ["3"], [True]) == [char_ids("1.add.2.3.")]
    with pytest.raises(ConfigError, match=r"^reward.parts.0.x: true, but the tokenizer has no chat template"):
        ConversationEncoder(plain, True, "reward.parts.0.x")


def test_the_score_is_read_where_transformers_reads_it() -> None:
    assert [score_place(ids, 0) for ids in ([5, 6, 7], [5, 6, 0], [5, 0, 7], [0, 0])] == [2, 1, 2, 0]
    assert score_place([5, 0], None) == 1
    batch = scored_batch([[5, 6, 0], [7]], pad_id=0)
    assert batch.response_mask.tolist() == [False, True, False, True]


def test_pairs_of_the_demo() -> None:
    """With and without a carry from the ones; by hand."""
    pair = load_tool("make_demo_pairs").pair
    assert pair("18+27=") == {"prompt": "18+27=", "chosen": "45", "rejected": "35"}
    assert pair("12+34=") == {"prompt": "12+34=", "chosen": "46", "rejected": "47"}
    assert pair("99+99=") == {"prompt": "99+99=", "chosen": "198", "rejected": "188"}
