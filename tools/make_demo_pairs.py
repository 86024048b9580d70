"""Makes preference pairs of the demo's additions: the right sum is chosen, the one that forgot its carry is rejected.

    python tools/make_demo_pairs.py [--assets runs/demo-assets]

Needs the files of tools/make_demo.py. Additions without a carry are rejected one too high. Held-out pairs are those of
the held-out additions. `varied_pairs.jsonl` rejects four wrong sums of each addition: that one, two with a wrong digit
somewhere, and one with a digit too few or too many. What was never rejected, a policy may come to like.
"""

import argparse
import json
import random
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, default=Path("runs/demo-assets"), help="folder of the demo's assets")
    options = parser.parse_args(arguments)
    data = options.assets / "data"
    for source, target in (("train.jsonl", "pairs.jsonl"), ("val.jsonl", "held_out_pairs.jsonl")):
        if not (data / source).is_file():
            print(f"{data / source}: no such file; run tools/make_demo.py first", file=sys.stderr)
            return 2
        rows = [json.loads(line) for line in (data / source).read_text(encoding="utf-8").splitlines()]
        lines = (json.dumps(pair(row["prompt"])) + "\n" for row in rows)
        (data / target).write_text("".join(lines), encoding="utf-8")
        print(f"{data / target}: {len(rows)} pairs")
        if source == "train.jsonl":
            rng = random.Random(0)
            varied = [one for row in rows for one in varied_pairs(row["prompt"], rng)]
            (data / "varied_pairs.jsonl").write_text(
                "".join(json.dumps(one) + "\n" for one in varied), encoding="utf-8"
            )
            print(f"{data / 'varied_pairs.jsonl'}: {len(varied)} pairs")
    return 0


def varied_pairs(prompt: str, rng: random.Random) -> list[dict[str, str]]:
    """The pair of `pair`, and three whose wrong sum is drawn."""
    first = pair(prompt)
    right = first["chosen"]
    # A fourth digit and the end token would be more than the demo's longest response.
    length = right + rng.choice("0123456789") if len(right) < 3 and rng.random() < 0.5 else right[:-1]
    rejected = [first["rejected"], wrong_digit(right, rng), wrong_digit(right, rng), length]
    return [{"prompt": prompt, "chosen": right, "rejected": wrong} for wrong in rejected]


def wrong_digit(right: str, rng: random.Random) -> str:
    """The number with another digit at one place."""
    place = rng.randrange(len(right))
    digit = rng.choice([digit for digit in "0123456789" if digit != right[place]])
    return right[:place] + digit + right[place + 1 :]


def pair(prompt: str) -> dict[str, str]:
    """`18+27=` is 45, and 35 without its carry; `12+34=` is 46, and not 47."""
    first, second = (int(number) for number in prompt.rstrip("=").split("+"))
    total = first + second
    wrong = total - 10 if first % 10 + second % 10 >= 10 else total + 1
    return {"prompt": prompt, "chosen": str(total), "rejected": str(wrong)}


if __name__ == "__main__":
    sys.exit(main())
