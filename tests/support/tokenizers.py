"""A character tokenizer whose ids are known by hand, saved as a Hugging Face folder."""

from pathlib import Path

SPECIAL = ["<pad>", "<s>", "</s>"]
CHARACTERS = "0123456789+-=abcdefghijklmnopqrstuvwxyz[] .?"
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no role tool here') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def char_ids(text: str) -> list[int]:
    """Token ids of a text: its characters' places after the special tokens."""
    return [len(SPECIAL) + CHARACTERS.index(character) for character in text]


def save_tokenizer(
    folder: Path,
    chat: bool = False,
    add_bos: bool = False,
    add_eos: bool = False,
    eos_token: str | None = "</s>",
    pad_token: str | None = None,
) -> Path:
    """Writes tokenizer.json and its configuration; `add_bos`/`add_eos` are what encoding with special tokens adds."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    around = f"{'<s> ' if add_bos else ''}$A{' </s>' if add_eos else ''}"
    backend.post_processor = processors.TemplateProcessing(single=around, special_tokens=[("<s>", 1), ("</s>", 2)])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token=eos_token, pad_token=pad_token)
    if chat:
        fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return folder


def save_sentencepiece_tokenizer(folder: Path, *, prepends: bool) -> Path:
    """Characters as tokens, and a space `▁` put before a text as Llama 2 does it (`prepends`: before each piece between
    special tokens) or as Mistral does (else: before the first)."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*SPECIAL, "▁", "\n", *CHARACTERS.replace(" ", "")])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="?"))
    if prepends:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.save_pretrained(folder)
    return folder


def save_byte_level_tokenizer(folder: Path) -> Path:
    """GPT-2's kind: bytes, of which a few are merged, among them two newlines (`ĊĊ`) and a space with a letter."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    merges = [("Ċ", "Ċ"), ("Ġ", "m"), ("4", "0"), ("o", "r"), ("Ċ", "4"), ("Ċ", "m")]
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return folder
