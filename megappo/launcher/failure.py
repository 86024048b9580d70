"""The first failing rank's error, so that one message is shown and not one a rank. Printing it is the caller's part.

When a rank fails, its peers fail right after it in a collective. So each failing rank claims one file; the first to
make it has told the cause, all others keep silent.
"""

import json
import os
import tempfile
import time
import traceback
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from megappo.config.layout_options import with_option_names
from megappo.errors import ExitCode, UserError

FAILURE_DIR = "MEGAPPO_FAILURE_DIR"
"""Environment variable: folder of the claim, set by the local launcher."""


@dataclass(frozen=True)
class Failure:
    """What ended a rank: the error's class and message, the exit code that it asks for, and its traceback."""

    rank: int
    time: float
    kind: str
    message: str
    exit_code: int
    traceback: str

    @classmethod
    def of(cls, error: BaseException, rank: int, layout_options: Collection[str] = ()) -> "Failure":
        """What rank `rank` tells of `error`: a traceback only where it is not a mistake of the user's. Settings of
        section `layout` that were typed as options go by their names."""
        is_users = isinstance(error, UserError)
        return cls(
            rank=rank,
            time=time.time(),
            kind=type(error).__name__,
            message=with_option_names(str(error), layout_options) if is_users else str(error),
            exit_code=ExitCode.BAD_INPUT if is_users else ExitCode.FAILED,
            traceback="" if is_users else "".join(traceback.format_exception(error)),
        )

    @property
    def text(self) -> str:
        """What the user reads: a mistake of theirs as its message, anything else with rank and traceback."""
        if self.traceback:
            return f"rank {self.rank} failed:\n{self.traceback.rstrip()}"
        return f"error: {self.message}"


def claim_failure(folder: Path, failure: Failure) -> bool:
    """Whether this failure is the first of the run; it is then kept in `folder`, complete from its first moment on."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".json", encoding="utf-8", delete=False) as file:
        json.dump(asdict(failure), file)
    try:
        os.link(file.name, folder / "failure.json")  # atomic, and refused where another rank was first
    except FileExistsError:
        return False
    finally:
        os.unlink(file.name)
    return True


def read_failure(folder: Path) -> Failure | None:
    """The first failure of the run, None where no rank has claimed one."""
    file = folder / "failure.json"
    return Failure(**json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None
