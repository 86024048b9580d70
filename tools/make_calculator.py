"""Makes the data of the calculator's example: sums too long for the demo's small model, some with a call.

    python tools/make_calculator.py [--out runs/calculator-data] [--seed 0]

The warm start shows mostly a guess, which is wrong, and sometimes a call `<<118+227+346>>` with its result: what a
reward can make the habit. Model and tokenizer are the demo's.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path

SHARE_OF_CALLS = 0.3
SIZES = {"warm_start": 4000, "train": 2000, "val": 200}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/calculator-data"), help="folder to make")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sums and of the guesses")
    options = parser.parse_args(arguments)
    draw = random.Random(options.seed)
    sums = list({tuple(draw.randrange(100, 1000) for _ in range(3)) for _ in range(2 * sum(SIZES.values()))})
    options.out.mkdir(parents=True, exist_ok=True)
    for name, size in SIZES.items():
        mine, sums = sums[:size], sums[size:]
        rows = (warm_start_row(one, draw) if name == "warm_start" else prompt_row(one) for one in mine)
        write_rows(options.out / f"{name}.jsonl", rows)
    print(f"{options.out}: {', '.join(f'{name}.jsonl' for name in SIZES)}")
    return 0


def prompt_row(terms: tuple[int, ...]) -> dict[str, str]:
    return {"prompt": "+".join(map(str, terms)) + "=", "answer": str(sum(terms))}


def warm_start_row(terms: tuple[int, ...], draw: random.Random) -> dict[str, str]:
    """A call with its result, or a guess near the sum."""
    prompt, answer = prompt_row(terms).values()
    if draw.random() < SHARE_OF_CALLS:
        return {"prompt": prompt, "response": f"<<{prompt.removesuffix('=')}>>{answer}"}
    return {"prompt": prompt, "response": str(sum(terms) + draw.choice([-1, 1]) * draw.randrange(1, 200))}


def write_rows(file: Path, rows: Iterable[dict[str, str]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
