"""What a wrong key or value is told: from pydantic's errors to problems with a path, a reason and a way out."""

import difflib
import json
from collections.abc import Iterator
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from megappo.config.problem import Problem, typed
from megappo.config.verl_names import VERL_NAMES
from megappo.config.yaml_file import FLOAT

TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
EXAMPLES = {int: "1", float: "1.0", bool: "true"}
VIRTUAL_STAGES = {
    "virtual_pipeline_model_parallel_size": "the same number",
    "num_layers_per_virtual_pipeline_stage": "layers / (pp · that number)",
}
"""verl's and Megatron's names of `layout.vpp`, and what to set it to."""
FSDP_NAMES = ("strategy", "fsdp_config", "fsdp_size", "wrap_policy")
"""Keys of a role by which verl's users ask for parameters that data-parallel ranks share."""
CONTEXT_SIZES = {
    "ulysses_sequence_parallel_size": "set layout.cp to this size, and model.cp_comm_type to a2a",
    "context_parallel_size": "set layout.cp to this size",
}
"""Keys of other sections in verl's and Megatron's files for what is `layout.cp` here: the way out."""
BOUNDS = {  # pydantic's error type: words before the bound
    "greater_than": "has to be greater than",
    "greater_than_equal": "has to be at least",
    "less_than": "has to be less than",
    "less_than_equal": "has to be at most",
}


def problems_of(error: ValidationError, root: type[BaseModel]) -> list[Problem]:
    """One problem for each path that pydantic complains about (a union complains once for each of its members)."""
    problems: dict[str, Problem] = {}
    for details in error.errors(include_url=False):
        path, field = locate(details["loc"], root)
        if details["type"] == "too_short" and any(known.startswith(f"{path}.") for known in problems):
            continue  # pydantic counts only the items that are right
        problem = _unknown(path, root) if details["type"] == "extra_forbidden" else _problem(path, field, details)
        problems.setdefault(path, problem)
    return list(problems.values())


def unknown_path(path: str, root: type[BaseModel]) -> Problem | None:
    """The problem of a dotted path that leads to no field of the tree, None where it does."""
    section: type[BaseModel] | None = root
    parts = path.split(".")
    for depth, part in enumerate(parts):
        if section is None:
            reason = f"{'.'.join(parts[:depth])} is a single value and has no key {part!r}"
            return Problem(path, None, reason, f"set {'.'.join(parts[:depth])} itself")
        if part.isdecimal():
            continue
        if part not in section.model_fields:
            return _unknown(".".join(parts[: depth + 1]), root)
        section = next(_sections(section.model_fields[part].annotation), None)
    return None


def locate(loc: tuple[int | str, ...], root: type[BaseModel]) -> tuple[str, FieldInfo | None]:
    """The YAML path of a pydantic location, without the names of union members that pydantic puts at its end.

    The field is that of the last section on the way; None where the key is unknown.
    """
    section: type[BaseModel] | None = root
    field: FieldInfo | None = None
    parts: list[str] = []
    for part in loc:
        if isinstance(part, int):
            parts.append(str(part))
        elif section is not None:
            parts.append(part)
            field = section.model_fields.get(part)
            section = next(_sections(field.annotation), None) if field is not None else None
        else:
            break
    return ".".join(parts), field


def known_keys(root: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every path of the tree, sections and leaves, lists without numbers."""
    for name, field in root.model_fields.items():
        yield f"{prefix}{name}"
        for section in _sections(field.annotation):
            yield from known_keys(section, f"{prefix}{name}.")


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """Sections inside a type: itself, members of a union, items of a tuple."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, UnionType, tuple):
        for argument in get_args(annotation):
            yield from _sections(argument)


def _unknown(path: str, root: type[BaseModel]) -> Problem:
    """Nearest known key of the same section; otherwise the key of that name in another section."""
    *parents, key = [part for part in path.split(".") if not part.isdecimal()]
    if key in VIRTUAL_STAGES:
        reason = "virtual pipeline stages (Megatron's interleaved schedule) are layout.vpp here, stages of each rank"
        return Problem(path, None, reason, f"set layout.vpp to {VIRTUAL_STAGES[key]}")
    if key in FSDP_NAMES and parents[:1] in (["actor"], ["critic"], ["ref"]):
        role = parents[0]
        reason = f"Megatron trains here, and {role}.fsdp.enable: true has all data-parallel ranks share its parameters"
        names = f"{role}.fsdp has reshard_after_forward and forward_prefetch too, {role}.offload moves to host memory"
        return Problem(path, None, reason, f"set {role}.fsdp.enable; {names}")
    if key in CONTEXT_SIZES:
        return Problem(path, None, "context parallelism is part of the layout, for all roles", CONTEXT_SIZES[key])
    verl_name = ".".join((*parents, key))
    if verl_name in VERL_NAMES:
        return Problem(path, None, "is verl's name", VERL_NAMES[verl_name])
    here = {name for name in known_keys(root) if name.split(".")[:-1] == parents}
    siblings = sorted(name.rpartition(".")[2] for name in here)
    close = difflib.get_close_matches(key, siblings, n=1, cutoff=0.6)
    prefix = path.rpartition(".")[0]
    if close:
        remedy = f"did you mean {prefix + '.' if prefix else ''}{close[0]}?"
    else:
        elsewhere = [name for name in known_keys(root) if name.rpartition(".")[2] == key]
        below = [name for name in elsewhere if name.startswith(f"{'.'.join(parents)}.")]
        remedy = f"did you mean {(below or elsewhere)[0]}?" if elsewhere else f"known here: {', '.join(siblings)}"
    return Problem(path, None, "unknown key", remedy)


def _problem(path: str, field: FieldInfo | None, details: ErrorDetails) -> Problem:
    if details["type"] == "missing":
        meaning = f" ({field.description.rstrip('.')})" if field is not None and field.description else ""
        return Problem(path, None, f"is missing{meaning}", f"for example {_example(field)}")
    value = details["input"]
    return Problem(path, typed(value), _reason(field, details), _remedy(field, details))


def _reason(field: FieldInfo | None, details: ErrorDetails) -> str:
    kind, context = details["type"], details.get("ctx", {})
    if kind in BOUNDS:
        bound = next(value for name, value in context.items() if name in ("gt", "ge", "lt", "le"))
        return f"{BOUNDS[kind]} {bound if isinstance(bound, int) else format(bound, 'g')}"
    if kind == "too_short":
        return f"needs at least {context['min_length']} item{'s' if context['min_length'] > 1 else ''}"
    if kind == "string_too_short":
        return "must not be empty"
    if kind == "finite_number":
        return "has to be a finite number"
    annotation = field.annotation if field is not None else None
    return f"has to be {describe(annotation)}" if annotation is not None else details["msg"]


def _remedy(field: FieldInfo | None, details: ErrorDetails) -> str:
    value, context = details["input"], details.get("ctx", {})
    options = list(_literals(field.annotation)) if field is not None else []
    if options:
        close = difflib.get_close_matches(str(value), options, n=1, cutoff=0.5)
        return f"did you mean {close[0]}?" if close else f"for example {options[0]}"
    if field is not None and str in _members(field.annotation) and not isinstance(value, str | list | dict):
        return f"put it in quotes: {json.dumps(str(value))}"
    if (
        field is not None
        and any(get_origin(member) is tuple for member in _members(field.annotation))
        and isinstance(details["loc"][-1], str)  # not one of its items
        and isinstance(value, str | int | float)
    ):
        return f"write it as a list: [{value}]"
    if isinstance(value, str) and FLOAT.fullmatch(value):
        return f"write it without quotes: {value}"
    for bound in ("ge", "le"):
        if bound in context:
            return f"for example {context[bound]:g}"
    return f"for example {_example(field)}"


def _example(field: FieldInfo | None) -> str:
    """A value that the field takes: its own example, its default, or one of its type."""
    if field is None:
        return "leave it out"
    if field.examples:
        return str(field.examples[0])
    default = field.get_default(call_default_factory=True)
    if isinstance(default, BaseModel):
        return "the keys of the section, indented below it"
    if default is not PydanticUndefined:
        return "null" if default is None else typed(default)
    literals = list(_literals(field.annotation))
    if literals:
        return literals[0]
    return next((example for kind, example in EXAMPLES.items() if kind is field.annotation), "a value of that type")


def describe(annotation: Any) -> str:
    """A type in words: `a whole number or null`, `one of gae, grpo`, `a list of strings`."""
    if annotation is type(None):
        return "null"
    if annotation in TYPE_NAMES:
        return TYPE_NAMES[annotation]
    origin = get_origin(annotation)
    if origin is Literal:
        names = ", ".join(map(str, get_args(annotation)))
        return f"one of {names}" if len(get_args(annotation)) > 1 else names
    if origin in (Union, UnionType):
        return " or ".join(describe(member) for member in get_args(annotation))
    if origin is tuple:
        arguments = get_args(annotation)
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return f"a list, each item {describe(arguments[0])}"
        return f"a list of {len(arguments)} items, each {describe(arguments[0])}"
    return "a section: keys and values, indented below it"


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _literals(annotation: Any) -> Iterator[str]:
    for member in _members(annotation):
        if get_origin(member) is Literal:
            yield from map(str, get_args(member))
