"""Writes docs/configuration.md: every setting of an experiment file, from the configuration classes.

python tools/config_reference.py [--out docs/configuration.md]
"""

import argparse
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megappo.config.experiment import ExperimentConfig
from megappo.config.yaml_file import write_yaml

OUT = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
TYPE_NAMES: dict[Any, str] = {bool: "true or false", int: "whole number", float: "number", str: "text"}
BOUNDS: dict[type, tuple[str, str]] = {Ge: ("≥", "ge"), Gt: (">", "gt"), Le: ("≤", "le"), Lt: ("<", "lt")}
HEADER = """\
# Configuration

<!-- Written by tools/config_reference.py; a test compares this page with the classes in megappo/config. -->

An experiment file is YAML. `base: other.yaml`, a path as seen from the file, takes over another file's settings:
sections merge, everything else, lists included, is replaced. `a.b=c` on the command line is laid over the file; a
number in the path is the place in a list (`reward.parts.0.weight=2`). Unknown keys are errors. What is not set has the
default of this page, whatever else of its section is set. What is set for a part that a run does not have, or has
turned off (a critic, a reference, a KL, replay, …), is told as a warning.
A file with `stages` is [several runs](preferences.md#stages), one after another.
`megappo show-config FILE` prints the result with all defaults; `megappo validate FILE` checks it and prints how its
batches are cut.

`model.path`, the data's files and sizes and `trainer.run_dir` have no default.
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="page to write")
    options = parser.parse_args(arguments)
    options.out.write_text(page(), encoding="utf-8")
    return 0


@dataclass(frozen=True)
class Part:
    """One section: its path (`reward.parts[]` for the items of a list), what is said of it, and its defaults there."""

    path: str
    kind: type[BaseModel]
    text: str
    defaults: BaseModel | None


def page() -> str:
    """The whole page; one heading a section, one table row a setting."""
    texts = [HEADER]
    for part in sections(ExperimentConfig):
        leaves = {name: field for name, field in part.kind.model_fields.items() if section_in(field.annotation) is None}
        rows = [row(name, field, part.defaults) for name, field in leaves.items()]
        table = "\n".join(["| setting | value | default | |", "|---|---|---|---|", *rows])
        texts.append(f"## {part.path}\n\n{part.text}\n\n{table}\n")
    return "\n".join(texts)


def sections(kind: type[BaseModel], prefix: str = "", defaults: BaseModel | None = None) -> Iterator[Part]:
    """Every section below `kind`, whose own defaults are `defaults` where it stands (None: those of the class)."""
    for name, field in kind.model_fields.items():
        below = section_in(field.annotation)
        if below is not None:
            path = f"{prefix}{name}" + ("[]" if is_list(field.annotation) else "")
            own = getattr(defaults, name) if defaults is not None else field.default
            own = own if isinstance(own, BaseModel) else None
            text = " ".join(sentence(words) for words in (below.__doc__, field.description) if words)
            yield Part(path, below, text, own)
            yield from sections(below, f"{path}.", own)


def section_in(annotation: Any) -> type[BaseModel] | None:
    """The section that a setting is, may be, or is a list of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for inner in get_args(annotation) if (found := section_in(inner)) is not None), None)


def row(name: str, field: FieldInfo, defaults: BaseModel | None) -> str:
    value = ", ".join([type_text(field.annotation), *bounds(field)])
    return f"| `{name}` | {value} | {default(name, field, defaults)} | {sentence(field.description)} |"


def default(name: str, field: FieldInfo, defaults: BaseModel | None) -> str:
    if field.is_required():
        return "required"
    value = field.default if defaults is None else getattr(defaults, name)
    return f"`{list(value) if isinstance(value, tuple) else write_yaml({'x': value}).removeprefix('x:').strip()}`"


def type_text(annotation: Any) -> str:
    """What may stand there, in words."""
    if annotation in TYPE_NAMES:
        return TYPE_NAMES[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if choice is types.NoneType else type_text(choice) for choice in arguments)
    assert origin is tuple, f"settings are scalars, choices and lists, not {annotation}"
    if is_list(annotation):
        return f"list of {type_text(arguments[0])}s".replace("texts", "text")
    return f"list of {len(arguments)} {type_text(arguments[0])}s"


def is_list(annotation: Any) -> bool:
    """Whether a setting is a list of any length (also where it may be null)."""
    return (get_origin(annotation) is tuple and get_args(annotation)[-1] is ...) or any(
        is_list(inner) for inner in get_args(annotation) if get_origin(annotation) in (Union, types.UnionType)
    )


def bounds(field: FieldInfo) -> list[str]:
    """`≥ 0`, `< 1`, …"""
    return [
        f"{sign} {getattr(bound, attribute):g}"
        for bound in field.metadata
        for kind, (sign, attribute) in BOUNDS.items()
        if isinstance(bound, kind)
    ]


def sentence(docstring: str | None) -> str:
    """A docstring on one line, safe inside a table."""
    assert docstring, "every setting and section has a docstring"
    return " ".join(docstring.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
