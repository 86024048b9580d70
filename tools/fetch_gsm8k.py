"""Copies the GSM8K data set from the Hugging Face hub to JSONL files of `question` and `answer`.

python tools/fetch_gsm8k.py [--out data/gsm8k]
"""

import argparse
import sys
from pathlib import Path

from megappo.errors import DataError, ExitCode, UserError

NAME, CONFIGURATION = "openai/gsm8k", "main"
SPLITS = ("train", "test")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("data/gsm8k"), help="folder of train.jsonl and test.jsonl")
    options = parser.parse_args(arguments)
    try:
        for split in SPLITS:
            fetch(split, options.out / f"{split}.jsonl")
    except UserError as error:
        print(f"fetch_gsm8k: {error}", file=sys.stderr)
        return ExitCode.BAD_INPUT
    return ExitCode.DONE


def fetch(split: str, file: Path) -> None:
    """Writes one split; a file that is there already is kept."""
    if file.exists():
        print(f"{file}: there already")
        return
    import datasets

    try:
        rows = datasets.load_dataset(NAME, CONFIGURATION, split=split)
    # The hub's clients raise OSError (network, offline) and ValueError (no such data set).
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            f"{NAME} can't be loaded from the hub ({reason}); without a network, put the data set's "
            f"JSONL files, rows of question and answer, at {file.parent}/train.jsonl and {file.parent}/test.jsonl"
        ) from error
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    rows.to_json(partial)
    partial.rename(file)
    print(f"{file}: {len(rows):,} rows")


if __name__ == "__main__":
    sys.exit(main())
