"""A calculator as a tool: the model writes `<<12*34>>`, or a chat tool call, and gets the result."""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from megappo.environments.environment import Reply
from megappo.experience.sample import Prompt

CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
REST = re.compile(r"\S*\s*")
"""What the token that ends a call can hold behind it, as in `>>\\n` or `>>.`: a turn ends with a whole token."""
MAX_CHARACTERS = 200
"""Of an expression: the parser is recursive."""
NO_RESULT = "error"

OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: operator.mod,
}


class Calculator:
    """Answers a turn whose last token closes `<<expression>>` with the result, after which the model goes on in the
    same text; and a turn with `<tool_call>{"name": "calculator", "arguments": {"expression": …}}</tool_call>` with a
    message of the role tool. Any other turn ends the response. An expression that can't be computed gives `error`."""

    stop = (">>",)

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt

    def answer(self, turn: str) -> Reply | None:
        """The result of `<<expression>>` at the turn's end, or of each `<tool_call>`; None where nothing was asked."""
        _, opened, call = turn.rpartition("<<")
        expression, closed, rest = call.partition(">>")
        if opened and closed and REST.fullmatch(rest):
            return Reply(calculated(expression))
        calls = CALL.findall(turn)
        if not calls:
            return None
        return Reply("\n".join(map(_called, calls)), role="tool")


def calculated(expression: str) -> str:
    """The value of sums, products and brackets, as a whole number where it is one, else with ten digits."""
    if len(expression) > MAX_CHARACTERS:
        return NO_RESULT
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
        # Python writes no integer of over 4300 digits (ValueError), and a float ends at 1.8e308 (OverflowError).
        return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError):
        return NO_RESULT


def _called(call: str) -> str:
    try:
        expression = json.loads(call)["arguments"]["expression"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return NO_RESULT
    return calculated(expression) if isinstance(expression, str) else NO_RESULT


def _value(node: ast.expr) -> Fraction:
    """Exact; ValueError for what is no arithmetic."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    raise ValueError("no arithmetic")
