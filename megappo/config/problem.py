"""What is wrong in a configuration, and how it is said. Which rules there are is in `load.py` and `checks.py`."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from megappo.errors import ConfigError


class Severity(Enum):
    """Whether a run can go on."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True)
class Problem:
    """One thing that can't be, or is surely not meant.

    `path` is the YAML path (`actor.optim.lr`), `value` what stands there as one would type it (None where nothing
    does), `reason` why it can't be, `remedy` a value that can.
    """

    path: str
    value: str | None
    reason: str
    remedy: str
    severity: Severity = Severity.ERROR

    def text(self, locations: Mapping[str, str] | None = None) -> str:
        """`path: value (file:line): reason; remedy`; the place is that of the path, or of its nearest parent."""
        place = nearest_location(self.path, locations or {})
        head = self.path if self.value is None else f"{self.path}: {self.value}"
        return f"{head} ({place}): {self.reason}; {self.remedy}" if place else f"{head}: {self.reason}; {self.remedy}"


def nearest_location(path: str, locations: Mapping[str, str]) -> str | None:
    """Where `path` was written, as `file:line`; for a value left at its default, where the section around it was."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        found = locations.get(".".join(parts[:end]))
        if found is not None:
            return found
    return None


def typed(value: Any) -> str:
    """A value as one would type it in YAML, shortened to 60 characters."""
    return shortened(json.dumps(value, ensure_ascii=False, default=str), 60)


def shortened(text: str, limit: int) -> str:
    """`text` in at most `limit` characters; the end stays, where a path has its file's name."""
    head = (limit - 3) // 2
    return text if len(text) <= limit else f"{text[:head]}...{text[head + 3 - limit :]}"


def raise_errors(problems: Iterable[Problem], locations: Mapping[str, str] | None = None) -> None:
    """Raises one ConfigError that tells all problems that are errors; warnings are left to the caller."""
    texts = [problem.text(locations) for problem in problems if problem.severity is Severity.ERROR]
    if len(texts) == 1:
        raise ConfigError(texts[0])
    if texts:
        raise ConfigError(f"{len(texts)} mistakes in the configuration:\n" + "\n".join(f"  - {text}" for text in texts))
