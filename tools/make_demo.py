"""Makes what the demo needs, on the spot: a tokenizer, a small Llama with random weights, and additions to learn.

    python tools/make_demo.py [--out runs/demo-assets] [--seed 0]

The warm start is taught additions whose carry was forgotten most of the time, so that the supervised model believes in
a plausible wrong answer and knows the right one as a second guess: what a reward can mend. Neither a held-out pair nor
its swapped form is in any training file. What is there already and was made by the same recipe is kept.
"""

import argparse
import dataclasses
import io
import json
import random
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Pair = tuple[int, int]
STAMP = "recipe.json"


@dataclass(frozen=True)
class Recipe:
    """Everything that the assets depend on; another recipe makes them anew."""

    seed: int = 0
    format: int = 1
    """Raised when the way that the files are made changes."""
    largest_number: int = 99
    """Numbers have two digits and don't end in 0: a round number never carries."""
    num_held_out: int = 500
    forgotten_carry: float = 0.7
    """Share of the warm start's additions with a carry from the ones to the tens whose answer forgets it."""
    hidden_size: int = 128
    intermediate_size: int = 512
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    initializer_range: float = 0.08
    """Larger than usual: so narrow a model learns to add in half the steps."""

    @property
    def numbers(self) -> list[int]:
        return [number for number in range(10, self.largest_number + 1) if number % 10]


@dataclass(frozen=True)
class Additions:
    """Ordered pairs to train on, and those held out."""

    train: list[Pair]
    held_out: list[Pair]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/demo-assets"), help="folder to make")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split, the forgotten carries and the weights")
    options = parser.parse_args(arguments)
    recipe = Recipe(seed=options.seed)
    if is_made(options.out, recipe):
        print(f"{options.out}: already made by this recipe")
        return 0
    make(options.out, recipe)
    print(f"{options.out}: tokenizer and model in model/, {', '.join(data_files())} in data/")
    return 0


def is_made(out: Path, recipe: Recipe) -> bool:
    """Whether `out` holds the assets of this very recipe; the stamp is written with the rest or not at all."""
    stamp = out / STAMP
    return stamp.exists() and json.loads(stamp.read_text(encoding="utf-8")) == dataclasses.asdict(recipe)


def make(out: Path, recipe: Recipe) -> None:
    """Makes all assets beside `out` and moves them there at the end, in place of older ones."""
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "data").mkdir(parents=True)
    rng = random.Random(recipe.seed)
    additions = split_pairs(recipe, rng)
    write_rows(partial / "data/warm_start.jsonl", (warm_start_row(pair, recipe, rng) for pair in additions.train))
    write_rows(partial / "data/train.jsonl", map(prompt_row, additions.train))
    write_rows(partial / "data/val.jsonl", map(prompt_row, additions.held_out))
    tokenizer = make_tokenizer(recipe)
    tokenizer.save_pretrained(partial / "model")
    make_model(recipe, tokenizer).save_pretrained(partial / "model")
    (partial / STAMP).write_text(json.dumps(dataclasses.asdict(recipe), indent=1), encoding="utf-8")
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)


def data_files() -> tuple[str, ...]:
    return ("warm_start.jsonl", "train.jsonl", "val.jsonl")


def split_pairs(recipe: Recipe, rng: random.Random) -> Additions:
    """Shuffled pairs. The split is drawn over unordered pairs: training sees both orders, the evaluation one."""
    unordered = [(a, b) for a in recipe.numbers for b in recipe.numbers if a <= b]
    rng.shuffle(unordered)
    held_out = [rng.choice([(a, b), (b, a)]) for a, b in unordered[: recipe.num_held_out]]
    train = [pair for a, b in unordered[recipe.num_held_out :] for pair in sorted({(a, b), (b, a)})]
    rng.shuffle(train)
    return Additions(train, held_out)


def prompt_text(pair: Pair) -> str:
    return f"{pair[0]}+{pair[1]}="


def prompt_row(pair: Pair) -> dict[str, str]:
    return {"prompt": prompt_text(pair), "answer": str(sum(pair))}


def warm_start_row(pair: Pair, recipe: Recipe, rng: random.Random) -> dict[str, str]:
    """The pair with its sum, or with what is left of it where the carry is forgotten."""
    forgets = has_carry(pair) and rng.random() < recipe.forgotten_carry
    return {"prompt": prompt_text(pair), "response": str(sum_without_carry(pair) if forgets else sum(pair))}


def has_carry(pair: Pair) -> bool:
    """Whether the ones add up to ten or more."""
    return pair[0] % 10 + pair[1] % 10 >= 10


def sum_without_carry(pair: Pair) -> int:
    """27 + 15 = 32: ones and tens added each for itself, the carry between them dropped."""
    return 10 * (pair[0] // 10 + pair[1] // 10) + (pair[0] + pair[1]) % 10


def write_rows(file: Path, rows: Iterable[dict[str, str]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_tokenizer(recipe: Recipe) -> Any:
    """A sentencepiece model of single characters, with bytes for every other one, as a Hugging Face tokenizer.

    A piece is one character long, so that digits stay single tokens and 7 is the same token wherever it stands.
    """
    import sentencepiece
    from transformers import LlamaTokenizer

    # Spaced out as well, so that the space is a piece and not three bytes.
    lines = [line for n in recipe.numbers for line in (f"{n}+{n}={2 * n}", f"{n} + {n} = {2 * n}")]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, model_type="bpe", max_sentencepiece_length=1,
        byte_fallback=True, vocab_size=4 + 256 + len(set("".join(lines))), character_coverage=1.0,
        add_dummy_prefix=False, remove_extra_whitespaces=False, normalization_rule_name="identity",
        pad_id=0, bos_id=1, eos_id=2, unk_id=3, pad_piece="<pad>", minloglevel=2,
    )  # fmt: skip
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    vocabulary = {pieces.id_to_piece(index): index for index in range(pieces.get_piece_size())}
    return LlamaTokenizer(vocab=vocabulary, merges=[], add_prefix_space=False, add_bos_token=True, pad_token="<pad>")


def make_model(recipe: Recipe, tokenizer: Any) -> Any:
    """A Llama with random weights in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=recipe.hidden_size, intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers, num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads, head_dim=recipe.head_dim, max_position_embeddings=64,
        initializer_range=recipe.initializer_range, tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return LlamaForCausalLM(config)


if __name__ == "__main__":
    sys.exit(main())
