"""Rule rewards. Each is a RewardFunction: 1 for a right answer and 0 for a wrong one, where a sample without truth
raises, or 0 to 1 for the form of an answer."""

from __future__ import annotations

import re
from decimal import Decimal

from megappo.experience.sample import RolloutSample

_NUMBER = re.compile(
    r"""
    (?P<sign> (?<![\w)\]]) [-−]                  # a minus, but not the one of 10-3,
            | (?: (?<=[=:\#]) | (?<=[=:\#][ \t]) ) [-−][ ] )?   # nor of 10 - 3, nor the bullet of a list
    (?: \\?\$ \s? (?P<inner> [-−] )? )?           # $5, \$5, -$5, $-5
    (?P<digits> [0-9]{1,3} (?:,[0-9]{3})+ (?![0-9]) (?:\.[0-9]+)?   # 1,234.5
              | [0-9]+ (?:\.[0-9]+)?                                # 1234.5
              | \.[0-9]+ )                                          # .5
    """,
    re.VERBOSE,
)
FINAL_ANSWER = "####"
_ANSWER_LINE = re.compile(rf"{re.escape(FINAL_ANSWER)}\s*{_NUMBER.pattern}\s*", re.VERBOSE)


def exact_match(sample: RolloutSample) -> float:
    """Whether the response is the ground truth, both stripped of surrounding white space."""
    return float(sample.text.strip() == ground_truth(sample).strip())


def gsm8k(sample: RolloutSample) -> float:
    """Whether the response's final number is the ground truth's.

    The final number is the first one after the last `####` that has one, else the last number in the text; so the
    ground truth may be a number or a whole GSM8K solution. Numbers are equal by value: 1,234.0 is $1234.
    """
    truth = final_number(ground_truth(sample))
    if truth is None:
        raise ValueError(f"no number in the ground truth {ground_truth(sample)!r}")
    return float(final_number(sample.text) == truth)


def answer_line(sample: RolloutSample) -> float:
    """How far a response keeps to the form that `gsm8k` reads, whatever the number: it ends with a line `#### number`.

    A quarter each for a `####`, for a number after the last one, for a last line (white space apart) of nothing but
    `####` and a number, and for ending there by itself rather than at the limit.
    """
    _, mark, rest = sample.text.rpartition(FINAL_ANSWER)
    if not mark:
        return 0.0
    if _NUMBER.search(rest) is None:
        return 0.25
    if _ANSWER_LINE.fullmatch(sample.text.rstrip().rpartition("\n")[2].strip()) is None:
        return 0.5
    return 1.0 if sample.finish_reason == "stop" else 0.75


def math_verify(sample: RolloutSample) -> float:
    """Whether math-verify holds the response's answer to be the ground truth (LaTeX, a plain expression, or a solution
    with `\\boxed`). Its time limits use SIGALRM, so it works in the main thread of a reward process only."""
    # 1 s to import (sympy): only where it is used.
    from math_verify import parse, verify

    text = ground_truth(sample).rpartition(FINAL_ANSWER)[2].strip()
    # A bare \frac{1}{2} is LaTeX for the parser only inside a LaTeX environment.
    gold = parse(text if "\\boxed" in text or "$" in text else f"\\boxed{{{text}}}")
    if not gold:
        raise ValueError(f"math-verify finds no expression in the ground truth {ground_truth(sample)!r}")
    return float(verify(gold, parse(sample.text)))


def final_number(text: str) -> Decimal | None:
    """The number that a text gives as its answer, by the rule of `gsm8k`; None where it has none."""
    for answer in reversed(text.split(FINAL_ANSWER)[1:]):
        first = _NUMBER.search(FINAL_ANSWER + answer)  # a minus may stand apart after it
        if first:
            return _value(first)
    numbers = list(_NUMBER.finditer(text))
    return _value(numbers[-1]) if numbers else None


def ground_truth(sample: RolloutSample) -> str:
    """The sample's ground truth; ValueError where the data set gives none."""
    if sample.prompt.answer is None:
        raise ValueError(
            f"prompt {sample.prompt.index} of {sample.prompt.source} has no ground truth: set data.answer_key to the "
            "column that holds it"
        )
    return sample.prompt.answer


def _value(match: re.Match[str]) -> Decimal:
    magnitude = Decimal(match["digits"].replace(",", ""))
    return -magnitude if match["sign"] or match["inner"] else magnitude
