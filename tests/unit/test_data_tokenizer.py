"""The tokenizer of a run: end tokens, padding, chat templates, and folders that hold none."""

import json
from pathlib import Path

import pytest

from megappo.config.model import ModelConfig
from megappo.data.tokenizer import load_tokenizer, run_tokenizer
from megappo.errors import DataError
from megappo.models.hf_folder import copy_companions
from tests.support.tokenizers import (
    CHARACTERS,
    char_ids,
    save_byte_level_tokenizer,
    save_sentencepiece_tokenizer,
    save_tokenizer,
)


def test_text_and_ids(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path))
    assert tokenizer.encode("12+7=") == char_ids("12+7=")
    assert tokenizer.encode_batch(["1", "", "23"]) == [char_ids("1"), [], char_ids("23")]
    assert tokenizer.encode_batch([]) == []
    assert tokenizer.decode([*char_ids("19"), tokenizer.eos_id]) == "19"
    assert tokenizer.decode([*char_ids("19"), tokenizer.eos_id], skip_special_tokens=False) == "19</s>"
    assert tokenizer.vocab_size == 3 + len(CHARACTERS)


def test_special_tokens_only_where_asked(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, add_bos=True))
    assert tokenizer.encode("7") == char_ids("7")
    assert tokenizer.encode("7", add_special_tokens=True) == [1, *char_ids("7")]


@pytest.mark.parametrize("prepends", [True, False])
def test_text_that_goes_on_gets_no_space_of_its_own(tmp_path: Path, prepends: bool) -> None:
    tokenizer = load_tokenizer(save_sentencepiece_tokenizer(tmp_path, prepends=prepends))

    def tokens(ids: list[int]) -> list[str]:
        return list(tokenizer._backend.convert_ids_to_tokens(ids))

    assert tokens(tokenizer.encode("408")) == ["▁", "4", "0", "8"]
    assert tokens(tokenizer.encode_after("408")) == ["4", "0", "8"]
    assert tokens(tokenizer.encode_after(" 4")) == ["▁", "4"]  # a space that was asked for
    assert tokens(tokenizer.encode_after("\n4")) == ["\n", "4"]
    assert tokenizer.encode_after("") == []
    turn = tokenizer.encode("so 12+34=")
    assert tokenizer.decode(turn + tokenizer.encode_after("46")) == "so 12+34=46"
    # After a special token, Llama 2's kind puts its space, as it does within a whole chat; Mistral's does not.
    assert tokens(tokenizer.encode_after("</s>[a")) == ["</s>", *(["▁"] if prepends else []), "[", "a"]


def test_text_that_goes_on_is_the_same_on_the_byte_level(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_byte_level_tokenizer(tmp_path))
    expected = {"408": ["40", "8"], " more": ["Ġm", "or", "e"], "\n4": ["Ċ", "4"], "\n\nm": ["Ċ", "Ċ", "m"], "": []}
    for text, tokens in expected.items():
        ids = tokenizer.encode_after(text)
        assert tokenizer._backend.convert_ids_to_tokens(ids) == tokens
        assert ids == tokenizer.encode(text)


@pytest.mark.parametrize(
    ("generation_config", "expected"),
    [
        (None, (2,)),
        ({"eos_token_id": 5}, (2, 5)),
        ({"eos_token_id": [5, 2, 6]}, (2, 5, 6)),
        ({"eos_token_id": None}, (2,)),
        ({}, (2,)),
    ],
)
def test_end_tokens(tmp_path: Path, generation_config: dict[str, object] | None, expected: tuple[int, ...]) -> None:
    folder = save_tokenizer(tmp_path)
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.eos_ids, tokenizer.eos_id) == (expected, 2)


@pytest.mark.parametrize(
    ("of_words", "of_model", "expected"),
    [
        (None, {"eos_token_id": [2, 7]}, (2, 7)),
        ({"eos_token_id": 5}, {"eos_token_id": [2, 7]}, (2, 5)),
        ({}, {"eos_token_id": [2, 7]}, (2,)),  # one file is read, as a checkpoint of the run holds one
        (None, None, (2,)),
    ],
)
def test_end_tokens_of_a_model_whose_tokenizer_is_elsewhere(
    tmp_path: Path, of_words: dict[str, object] | None, of_model: dict[str, object] | None, expected: tuple[int, ...]
) -> None:
    """And what the run's checkpoints hold in one folder has the same."""
    words, model, saved = save_tokenizer(tmp_path / "words"), tmp_path / "model", tmp_path / "saved"
    model.mkdir()
    saved.mkdir()
    for folder, content in ((words, of_words), (model, of_model)):
        if content is not None:
            (folder / "generation_config.json").write_text(json.dumps(content))
    tokenizer = run_tokenizer(ModelConfig(path=str(model), tokenizer_path=str(words)))
    assert (tokenizer.eos_ids, tokenizer.eos_id) == (expected, 2)
    copy_companions(model, saved, words)
    assert load_tokenizer(saved).eos_ids == expected


def test_end_tokens_that_the_tokenizer_has_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, last = save_tokenizer(tmp_path), 2 + len(CHARACTERS)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [last, last + 1, 128009]}))
    assert load_tokenizer(folder).eos_ids == (2, 46) == (2, last)
    assert "generation_config.json: the end tokens [47, 128009] are left out" in caplog.text
    assert "vocabulary ends at 46" in caplog.text


def test_padding_is_the_end_token_where_there_is_none(tmp_path: Path) -> None:
    assert load_tokenizer(save_tokenizer(tmp_path / "without")).pad_id == 2
    assert load_tokenizer(save_tokenizer(tmp_path / "with", pad_token="<pad>")).pad_id == 0


def test_chat_template(tmp_path: Path) -> None:
    plain = load_tokenizer(save_tokenizer(tmp_path / "plain"))
    chat = load_tokenizer(save_tokenizer(tmp_path / "chat", chat=True))
    assert (plain.has_chat_template, chat.has_chat_template) == (False, True)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "1"}]
    assert chat.render_chat(messages) == "[system]s[user]1[assistant]"  # type: ignore[arg-type]
    assert chat.render_chat(messages, add_generation_prompt=False) == "[system]s[user]1"  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"refuses messages with the roles \[tool\]: no role tool here"):
        chat.render_chat([{"role": "tool", "content": "1"}])


def test_saved_and_loaded(tmp_path: Path) -> None:
    load_tokenizer(save_tokenizer(tmp_path / "a", chat=True)).save(tmp_path / "b")
    again = load_tokenizer(tmp_path / "b")
    assert again.encode("12") == char_ids("12")
    assert again.has_chat_template


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'nowhere' does not exist"):
        load_tokenizer("nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no usable tokenizer in the folder"):
        load_tokenizer(tmp_path / "empty")
    with pytest.raises(DataError, match=r"has no end-of-sequence token: set eos_token in tokenizer_config.json"):
        load_tokenizer(save_tokenizer(tmp_path / "endless", eos_token=None))
    folder = save_tokenizer(tmp_path / "broken")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2,\n')
    with pytest.raises(DataError, match=r"generation_config.json:2: not JSON"):
        load_tokenizer(folder)
