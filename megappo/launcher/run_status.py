"""Leaves in a run's folder that it failed, for those who read `status.json` instead of an exit code.

The trainer itself writes the other states; a rank that was killed can write nothing, so its launcher does.
"""

from pathlib import Path

from megappo.config.requests import Request, TrainRequest
from megappo.errors import ExitCode
from megappo.observe.run_folder import RunFolder


def record_end(request: Request, code: ExitCode) -> None:
    """Marks the run of a training request as failed, unless it is done or stopped after saving."""
    if isinstance(request, TrainRequest) and code not in (ExitCode.DONE, ExitCode.STOPPED_AFTER_SAVING):
        RunFolder(Path(request.config.trainer.run_dir)).failed(int(code))
