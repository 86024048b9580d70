"""Reading and writing YAML: every value with the file and line that it stands on. What the values mean is in `load.py`.

Scalars follow YAML 1.2: `1e-6` is a number, `yes` and `12:30` and `2026-01-02` are strings.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from megappo.errors import ConfigError

FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
SCALARS = (  # tag, pattern of the whole scalar, its possible first characters
    ("tag:yaml.org,2002:null", re.compile(r"(~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", re.compile(r"(true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("tag:yaml.org,2002:int", re.compile(r"[-+]?[0-9]+$"), list("-+0123456789")),
    ("tag:yaml.org,2002:float", re.compile(f"({FLOAT.pattern})$"), list("-+.0123456789")),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}


for _tag, _pattern, _first in SCALARS:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)


@dataclass(frozen=True)
class Document:
    """A YAML mapping as plain values, and where each path of it stands: `{"actor.optim.lr": "demo.yaml:12"}`."""

    values: dict[str, Any]
    locations: dict[str, str] = field(default_factory=dict)


def read_yaml(path: Path) -> Document:
    """Reads one file; raises ConfigError where it is missing, no YAML, empty, no mapping, or has a key twice."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(f"{path} {what}; give the path of an experiment file such as yaml/demo_cpu.yaml")
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(_syntax_message(str(path), error)) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not a text file ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from None
    if node is None:
        raise ConfigError(f"{path} is empty; an experiment file has at least the sections model, data and trainer")
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}:{node.start_mark.line + 1} is not a mapping; write `section:` and its keys below it")
    document = Document(values={})
    document.values.update(_construct(node, str(path), "", document.locations))
    return document


def parse_value(text: str, where: str) -> Any:
    """The value of an override such as `1e-6`, `null` or `[a, b]`; raises ConfigError where it is no YAML."""
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(_syntax_message(where, error) + "; quote the value where it has special characters") from None
    return None if node is None else _construct(node, where, "", {})


def write_yaml(values: dict[str, Any]) -> str:
    """The text of a mapping, keys in their order; `read_yaml` gives the same values back."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _construct(node: yaml.Node, file: str, path: str, locations: dict[str, str]) -> Any:
    locations[path] = f"{file}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.MappingNode):
        return _construct_mapping(node, file, path, locations)
    if isinstance(node, yaml.SequenceNode):
        return [
            _construct(item, file, f"{path}.{index}" if path else str(index), locations)
            for index, item in enumerate(node.value)
        ]
    assert isinstance(node, yaml.ScalarNode), f"YAML has mappings, sequences and scalars, not {node}"
    return _construct_scalar(node)


def _construct_mapping(node: yaml.MappingNode, file: str, path: str, locations: dict[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{file}:{line}: a key has to be a word, not a list or a mapping")
        key = str(key_node.value)
        child = f"{path}.{key}" if path else key
        if key in values:
            raise ConfigError(f"{child} ({file}:{line}) was already given in line {lines[key]}; keep one of the two")
        values[key], lines[key] = _construct(value_node, file, child, locations), line
        locations[child] = f"{file}:{line}"  # the key's line, also where the value begins below it
    return values


def _construct_scalar(node: yaml.ScalarNode) -> Any:
    text = node.value
    match node.tag.rpartition(":")[2]:
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case "int":
            return int(text)
        case "float":
            return float(text.replace(".inf", "inf").replace(".Inf", "inf").replace(".INF", "inf").replace(".n", "n"))
        case _:
            return text


def _syntax_message(where: str, error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{where}:{mark.line + 1} is not YAML: {error.problem} (column {mark.column + 1})"
    return f"{where} is not YAML: {error}"
