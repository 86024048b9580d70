"""Rule rewards by value."""

import dataclasses
from decimal import Decimal

import pytest

from megappo.rewards.rules import answer_line, exact_match, final_number, gsm8k, math_verify
from tests.support.samples import make_sample

SOLUTION = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 48+24 = <<48+24=72>>72 altogether.\n#### 72"


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("19", "19", 1),
        (" 19\n", "19", 1),
        ("19", " 19 ", 1),
        ("19.", "19", 0),
        ("019", "19", 0),
        ("", "19", 0),
        ("1 9", "19", 0),
        ("Yes", "yes", 0),
    ],
)
def test_exact_match(text: str, answer: str, score: float) -> None:
    assert exact_match(make_sample(text, answer)) == score


# (text, the number that it gives as its answer)
NUMBERS = [
    ("#### 72", "72"),
    (SOLUTION, "72"),
    ("72", "72"),
    ("The answer is 72.", "72"),
    ("So 3 + 4 = 7, and 7 * 2 = 14 apples", "14"),
    ("#### 5\nand then I add 9", "5"),
    ("#### 5 is wrong\n#### 6", "6"),
    ("#### none, so 8", "8"),
    ("it is 12 ####", "12"),
    ("#### $1,234.50", "1234.5"),
    ("#### \\$18", "18"),
    ("1,234,567 people", "1234567"),
    ("either 3,4", "4"),
    ("12,34", "34"),
    ("1,2345", "2345"),
    ("-5", "-5"),
    ("#### -5", "-5"),
    ("#### -$5", "-5"),
    ("#### $-5", "-5"),
    ("−7 degrees", "-7"),
    ("10-3", "3"),
    ("from 5-10 days", "10"),
    ("10 - 3", "3"),
    ("Eggs left:\n- 42", "42"),
    ("So the answers are:\n  - 42 eggs", "42"),
    ("The total:\n- $42", "42"),
    ("- 42", "42"),
    ("The total: - $42", "-42"),
    ("10 - 13 = - 3", "-3"),
    ("#### - 5", "-5"),
    ("####- 5", "-5"),
    ("(4)-2", "2"),
    ("x = -2", "-2"),
    (".5 of it", "0.5"),
    ("0.50", "0.5"),
    ("50%", "50"),
    ("72.0", "72"),
    ("v1.2.3", "0.3"),
    ("no number", None),
    ("", None),
    ("####", None),
]


@pytest.mark.parametrize(("text", "number"), NUMBERS)
def test_final_number(text: str, number: str | None) -> None:
    assert final_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("He has 70+2 = 72 of them.", SOLUTION, 1),
        ("#### 72", "72", 1),
        ("#### 72.00", "72", 1),
        ("72 or 73", SOLUTION, 0),
        ("#### 27", SOLUTION, 0),
        ("", SOLUTION, 0),
        ("1,000 dollars", "#### 1000", 1),
        ("-3", "3", 0),
    ],
)
def test_gsm8k(text: str, answer: str, score: float) -> None:
    assert gsm8k(make_sample(text, answer)) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("", 0),
        ("The answer is 72.", 0),
        ("###\n72", 0),
        ("#### ", 0.25),
        ("72 ####", 0.25),
        ("Twice 36.\n#### seventy-two", 0.25),
        ("#### 72 clips", 0.5),
        ("So #### 72", 0.5),
        ("#### 72\nShe sold 72.", 0.5),
        ("#### 72\n#### none, so 8", 0.5),
        ("####\n72", 0.5),
        (SOLUTION, 1),
        ("#### 5\n#### -$1,234.50 \n\n", 1),
        ("####72", 1),
    ],
)
def test_answer_line(text: str, score: float) -> None:
    """Whatever the number, and without a ground truth."""
    assert answer_line(make_sample(text, None)) == score
    cut = dataclasses.replace(make_sample(text, None), finish_reason="length")
    assert answer_line(cut) == min(score, 0.75)


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("The answer is \\boxed{\\frac{1}{2}}.", "1/2", 1),
        ("so $0.5$", "\\frac{1}{2}", 1),
        ("$x + 1$", "$1 + x$", 1),
        ("the answer is 72", SOLUTION, 1),
        ("it is $1234$", "1,234", 1),
        ("$\\boxed{3}$", "Thus $\\boxed{4}$", 0),
        ("no idea", "5", 0),
        ("", "5", 0),
    ],
)
def test_math_verify(text: str, answer: str, score: float) -> None:
    assert math_verify(make_sample(text, answer)) == score


@pytest.mark.parametrize("rule", [exact_match, gsm8k, math_verify])
def test_no_ground_truth(rule) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=r"prompt 0 of made has no ground truth: set data.answer_key"):
        rule(make_sample("5", None))


def test_a_ground_truth_without_a_number() -> None:
    with pytest.raises(ValueError, match="no number in the ground truth 'many'"):
        gsm8k(make_sample("5", "many"))
