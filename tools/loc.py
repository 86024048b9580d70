"""Prints the sizes that a reader feels: lines of the package, longest file and function, configuration leaves.

python tools/loc.py
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from megappo.config.experiment import ExperimentConfig

PACKAGE = Path(__file__).resolve().parents[1] / "megappo"


@dataclass(frozen=True, order=True)
class Size:
    """Lines of something, and where it stands."""

    lines: int
    place: str


def main() -> int:
    files = sorted(PACKAGE.rglob("*.py"))
    lines = {file: file.read_text(encoding="utf-8").splitlines() for file in files}
    longest_file = max(Size(len(content), place(file)) for file, content in lines.items())
    longest_function = max(function for file in files for function in function_sizes(file))
    code = sum(bool(line.strip()) for content in lines.values() for line in content)
    print(f"package            {sum(map(len, lines.values())):,} lines in {len(files)} files, {code:,} not blank")
    print(f"longest file       {longest_file.lines} lines: {longest_file.place}")
    print(f"longest function   {longest_function.lines} lines: {longest_function.place}")
    print(f"configuration      {len(set(leaf_paths(ExperimentConfig)))} leaves")
    return 0


def place(file: Path) -> str:
    return str(file.relative_to(PACKAGE.parent))


def function_sizes(file: Path) -> Iterator[Size]:
    """Every function of a file, decorators and docstring included."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            assert node.end_lineno is not None, "a parsed function has an end"
            yield Size(node.end_lineno - start + 1, f"{place(file)}:{start} {node.name}")


def leaf_paths(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted paths of a section's settings; the items of a list of sections count once, as `parts.*.name`."""
    for name, field in section.model_fields.items():
        below = list(sections_in(field.annotation))
        if not below:
            yield f"{prefix}{name}"
        for nested in below:
            nested_prefix = f"{prefix}{name}." if nested in alternatives(field.annotation) else f"{prefix}{name}.*."
            yield from leaf_paths(nested, nested_prefix)


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation alone."""
    is_plain = isinstance(annotation, type) and not get_args(annotation)
    return (annotation,) if is_plain else (annotation, *get_args(annotation))


def sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Configuration sections anywhere inside a type annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from sections_in(argument)


if __name__ == "__main__":
    sys.exit(main())
