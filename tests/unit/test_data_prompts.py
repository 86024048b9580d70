"""Prompts and supervised pairs as token ids: templates, limits, answers, and rows that can't become either."""

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megappo.config.data import DataConfig
from megappo.data.prompts import load_prompts, load_supervised
from megappo.data.render import PromptRenderer
from megappo.data.sources import read_rows
from megappo.data.text_prompts import TextPrompts
from megappo.data.tokenizer import Tokenizer, load_tokenizer
from megappo.errors import ConfigError, DataError
from tests.support.tokenizers import char_ids, save_tokenizer

GSM8K = Path(__file__).resolve().parents[3] / "shared" / "data" / "gsm8k" / "train.jsonl"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Adds <s> in front and </s> behind, as some tokenizers do."""
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


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    return write(
        tmp_path / "sums.jsonl", {"prompt": "1+1=", "answer": "2", "level": 3}, {"prompt": "12+7=", "answer": 19}
    )


def test_plain_prompts(sums: Path, plain: Tokenizer) -> None:
    first, second = load_prompts(config(sums), plain, [str(sums)])
    assert first.token_ids == (1, *char_ids("1+1="))  # with the start token, without the end token
    assert (first.text, first.answer, first.index, first.source) == ("1+1=", "2", 0, "sums")
    assert first.extra == {"level": 3}
    assert (second.token_ids, second.answer, second.index) == ((1, *char_ids("12+7=")), "19", 1)


def test_a_prompt_template_may_hold_other_braces(sums: Path, plain: Tokenizer) -> None:
    data = config(sums, prompt_template="sum {prompt} in {box}")
    assert load_prompts(data, plain, [str(sums)])[0].text == "sum 1+1= in {box}"


def test_chat_prompts(sums: Path, chat: Tokenizer) -> None:
    data = config(sums, system_prompt="be good", prompt_template="say {prompt}")
    prompt = load_prompts(data, chat, [str(sums)])[0]
    assert prompt.text == "[system]be good[user]say 1+1=[assistant]"
    assert prompt.token_ids == tuple(char_ids(prompt.text))  # a rendered chat gets no further start token
    plain_text = load_prompts(config(sums, apply_chat_template=False), chat, [str(sums)])[0]
    assert plain_text.token_ids == (1, *char_ids("1+1="))


def test_chat_messages(tmp_path: Path, chat: Tokenizer) -> None:
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}]
    path = write(tmp_path / "a.jsonl", {"prompt": turns}, {"prompt": [{"role": "system", "content": "own"}, *turns]})
    first, second = load_prompts(config(path, answer_key=None, system_prompt="s"), chat, [str(path)])
    assert first.text == "[system]s[user]1[assistant]2[user]3[assistant]"
    assert second.text == "[system]own[user]1[assistant]2[user]3[assistant]"  # a row's own system message stays
    assert first.answer is None


CALLS = [
    {"role": "user", "content": "2*3"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": {"name": "mul", "args": "23"}}]},
    {"role": "tool", "content": "6", "tool_call_id": "c1", "name": "mul"},
]
CALLS_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}{{ '.' + m.name if 'name' in m }}"
    "{{ '.' + m.tool_call_id if 'tool_call_id' in m }}]{{ m.content if m.content is not none }}"
    "{% for call in m.tool_calls %}[{{ call.id }}.{{ call.function.name }}.{{ call.function.args }}]{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_chat_messages_keep_what_the_template_reads(tmp_path: Path, kind: str) -> None:
    chat = load_tokenizer(save_tokenizer(tmp_path, chat=True))
    chat._backend.chat_template = CALLS_TEMPLATE
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        write(path, {"prompt": CALLS})
    else:  # every turn has all keys there, null where it had none
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": CALLS}]), path)
        assert read_rows(str(path))[0].columns["prompt"][0]["tool_call_id"] is None
    data = config(path, answer_key=None, max_prompt_length=100)
    (prompt,) = load_prompts(data, chat, [str(path)])
    assert prompt.text == "[user]2*3[assistant][c1.mul.23][tool.mul.c1]6[assistant]"
    assert prompt.text == chat._backend.apply_chat_template(CALLS, tokenize=False, add_generation_prompt=True)
    assert prompt.messages == tuple(CALLS)
    assert TextPrompts([prompt], PromptRenderer(data, chat), 200)[0] == prompt  # as with data.prefetch


def test_a_turn_without_content_has_calls(tmp_path: Path, chat: Tokenizer) -> None:
    call = {"role": "assistant", "tool_calls": [{"name": "mul"}]}
    path = write(tmp_path / "a.jsonl", {"prompt": [CALLS[0], call]})
    assert load_prompts(config(path, answer_key=None), chat, [str(path)])[0].messages == (CALLS[0], call)
    write(path, {"prompt": [CALLS[0], {"role": "assistant", "tool_calls": []}]})
    with pytest.raises(DataError, match="a list of messages with role and content"):
        load_prompts(config(path, answer_key=None), chat, [str(path)])


# (overlong, prompts that remain, message in the log); the limit is 4 tokens.
OVERLONG = [
    ("left", ["345=", "<s>7="], "cut the start of 1 of 2 prompts to 4 tokens"),
    ("right", ["<s>123", "<s>7="], "cut the end of 1 of 2 prompts to 4 tokens"),
    ("filter", ["<s>7="], "left out 1 of 2 prompts of over 4 tokens"),
]


@pytest.mark.parametrize(("overlong", "texts", "message"), OVERLONG)
def test_overlong_prompts(
    tmp_path: Path, chat: Tokenizer, caplog: pytest.LogCaptureFixture, overlong: str, texts: list[str], message: str
) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "12345="}, {"prompt": "7="})
    data = config(path, answer_key=None, max_prompt_length=4, overlong_prompts=overlong, apply_chat_template=False)
    with caplog.at_level(logging.WARNING):
        prompts = load_prompts(data, chat, [str(path)])
    assert [chat.decode(prompt.token_ids, skip_special_tokens=False) for prompt in prompts] == texts
    assert message in caplog.text
    assert prompts[-1].index == 1


def test_an_overlong_prompt_is_an_error_by_default(tmp_path: Path, plain: Tokenizer) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "7="}, {"prompt": "12345="})
    with pytest.raises(DataError) as error:
        load_prompts(config(path, answer_key=None, max_prompt_length=6), plain, [str(path)])
    assert str(error.value) == (
        f"{path}:2: the prompt has 7 tokens, data.max_prompt_length is 6; set data.max_prompt_length=7 or more, or "
        "data.overlong_prompts to left, right or filter"
    )


def test_nothing_left_after_filtering(sums: Path, plain: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"nothing is left after filtering by data.max_prompt_length=2"):
        load_prompts(config(sums, max_prompt_length=2, overlong_prompts="filter"), plain, [str(sums)])


def test_max_samples_counts_rows_of_each_file(tmp_path: Path, plain: Tokenizer) -> None:
    files = [write(tmp_path / f"{name}.jsonl", *({"prompt": f"{name}{i}"} for i in range(3))) for name in "ab"]
    prompts = load_prompts(config(files[0], answer_key=None), plain, [str(file) for file in files], max_samples=2)
    assert [(prompt.source, prompt.index, prompt.text) for prompt in prompts] == [
        ("a", 0, "a0"), ("a", 1, "a1"), ("b", 0, "b0"), ("b", 1, "b1"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "text"),
    [("2", "2"), (" 2 ", " 2 "), (2, "2"), (-2.5, "-2.5"), (True, "true"), ([1, 2], "[1, 2]"),
     ({"ground_truth": "7", "style": "rule"}, "7"), ({"ground_truth": 7}, "7"), ({"a": "é"}, '{"a": "é"}')],
)  # fmt: skip
def test_answers_become_text(tmp_path: Path, plain: Tokenizer, answer: object, text: str) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "1", "answer": answer})
    assert load_prompts(config(path), plain, [str(path)])[0].answer == text


# (row, settings, tokenizer, message)
MISTAKES = [
    ({"question": "1", "answer": "1"}, {}, "plain", "a.jsonl:1: no column 'prompt'; the columns are 'question'"),
    ({"prompt": "1", "anser": "1"}, {}, "plain", "a.jsonl:1: no column 'answer'.*set data.answer_key=anser"),
    ({"prompt": "1", "answer": None}, {}, "plain", "a.jsonl:1: column 'answer' is null"),
    ({"prompt": 7, "answer": "1"}, {}, "plain", "a.jsonl:1: 'prompt' must be a string or a list of messages .* not 7"),
    ({"prompt": [], "answer": "1"}, {}, "chat", r"must be a string or a list of messages .* not \[\]"),
    ({"prompt": [{"role": "user"}], "answer": "1"}, {}, "chat", "must be a string or a list of messages"),
    ({"prompt": [{"role": "user", "content": "1"}], "answer": "1"}, {}, "plain", "no chat template is applied"),
    ({"prompt": [{"role": "tool", "content": "1"}], "answer": "1"}, {}, "chat", "a.jsonl:1: the chat template refuses"),
    ({"prompt": "", "answer": "1"}, {"apply_chat_template": False, "prompt_template": "{prompt}"}, "bare",
     "a.jsonl:1: the prompt has no tokens"),
    ({"prompt": "1", "answer": "1"}, {"apply_chat_template": True}, "plain", "data.apply_chat_template: true, but"),
    ({"prompt": "1", "answer": "1"}, {"system_prompt": "s"}, "plain", "data.system_prompt: 's' needs a chat template"),
    ({"prompt": "1", "answer": "1"}, {"prompt_template": "x"}, "plain", "data.prompt_template: 'x' leaves the prompt"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "settings", "which", "message"), MISTAKES)
def test_mistakes(
    tmp_path: Path, plain: Tokenizer, chat: Tokenizer, row: dict[str, Any], settings: dict[str, Any], which: str,
    message: str,
) -> None:  # fmt: skip
    path = write(tmp_path / "a.jsonl", row)
    tokenizer = {"plain": plain, "chat": chat}.get(which) or load_tokenizer(save_tokenizer(tmp_path / "bare"))
    with pytest.raises((DataError, ConfigError), match=message):
        load_prompts(config(path, **settings), tokenizer, [str(path)])


def test_supervised_pairs(tmp_path: Path, plain: Tokenizer) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "1+1=", "response": "2"}, {"prompt": "9=", "response": ""})
    first, second = load_supervised(config(path), plain, [str(path)])
    assert first.token_ids == (1, *char_ids("1+1="), *char_ids("2"), plain.eos_id)
    assert first.response_start == 5
    assert (second.token_ids, second.response_start) == ((1, *char_ids("9="), plain.eos_id), 3)


def test_supervised_pairs_in_a_chat(tmp_path: Path, chat: Tokenizer) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "1", "response": "2"})
    (example,) = load_supervised(config(path), chat, [str(path)])
    assert example.token_ids == (*char_ids("[user]1[assistant]2"), chat.eos_id)
    assert example.response_start == len("[user]1[assistant]")


@pytest.mark.parametrize(("overlong", "targets"), [("filter", ["2</s>"]), ("right", ["123", "2</s>"])])
def test_overlong_responses(tmp_path: Path, plain: Tokenizer, overlong: str, targets: list[str]) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "1", "response": "1234"}, {"prompt": "1", "response": "2"})
    data = config(path, max_response_length=3, overlong_prompts=overlong)
    examples = load_supervised(data, plain, [str(path)])
    responses = [example.token_ids[example.response_start :] for example in examples]
    assert [plain.decode(ids, skip_special_tokens=False) for ids in responses] == targets


def test_supervised_mistakes(tmp_path: Path, plain: Tokenizer) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "1", "response": "1234567890"})
    with pytest.raises(
        DataError, match=r"a.jsonl:1: the response has 11 tokens with its end token, .* is 8; set .*=11"
    ):
        load_supervised(config(path), plain, [str(path)])
    write(path, {"prompt": "1", "response": 7})
    with pytest.raises(DataError, match=r"a.jsonl:1: column 'response' must be a string, not 7"):
        load_supervised(config(path), plain, [str(path)])


@pytest.mark.skipif(not GSM8K.exists(), reason="needs the GSM8K files beside the checkout")
def test_gsm8k(plain: Tokenizer) -> None:
    data = config(GSM8K, prompt_key="question", max_prompt_length=2000)
    prompts = load_prompts(data, plain, [str(GSM8K)])
    assert len(prompts) == 7473
    assert prompts[0].text.startswith("Natalia sold clips")
    assert prompts[0].answer is not None
    assert prompts[0].answer.endswith("#### 72")
