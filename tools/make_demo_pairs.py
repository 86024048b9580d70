"""Makes preference pairs of the demo's additions: the right sum is chosen, the one that forgot its carry is rejected.

    python tools/make_demo_pairs.py [--assets runs/demo-assets]

Needs the files of tools/make_demo.py. Additions without a carry are rejected one too high. Held-out pairs are those of
the held-out additions.
"""

import argparse
import json
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
    return 0


def pair(prompt: str) -> dict[str, str]:
    """`18+27=` is 45, and 35 without its carry; `12+34=` is 46, and not 47."""
    first, second = (int(number) for number in prompt.rstrip("=").split("+"))
    total = first + second
    wrong = total - 10 if first % 10 + second % 10 >= 10 else total + 1
    return {"prompt": prompt, "chosen": str(total), "rejected": str(wrong)}


if __name__ == "__main__":
    sys.exit(main())
