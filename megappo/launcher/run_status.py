"""Leaves in a run's folder that it failed, for those who read `status.json` instead of an exit code.

The trainer itself writes the other states; a rank that was killed can write nothing, so its launcher does.
"""

import logging
from pathlib import Path

from megappo.config.requests import Request, TrainRequest
from megappo.errors import ExitCode
from megappo.observe.run_folder import RunFolder

_log = logging.getLogger(__name__)


def record_begin(request: Request) -> None:
    """Of a training request: what `status.json` tells of a failure from now on is this attempt's. One rank calls it."""
    if isinstance(request, TrainRequest):
        RunFolder(Path(request.config.trainer.run_dir)).begin()


def record_end(request: Request, code: ExitCode) -> None:
    """Marks the run of a training request as failed, unless it is done or stopped after saving. Never raises: how the
    run ended is told by its exit code all the same, and its process groups have to be left."""
    if not isinstance(request, TrainRequest) or code in (ExitCode.DONE, ExitCode.STOPPED_AFTER_SAVING):
        return
    folder = RunFolder(Path(request.config.trainer.run_dir))
    try:
        folder.failed(int(code))
    except Exception as error:  # noqa: BLE001  the failure before it is the one to tell
        _log.warning("%s: cannot be marked as failed: %s", folder.path / "status.json", error)
