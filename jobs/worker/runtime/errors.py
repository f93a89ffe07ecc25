"""The failures that this job explains in one line; anything else is a bug and shows its traceback.

SquadError          exit code 1
├── DatasetError    a data file or hub dataset can't be used; also a ValueError
├── ModelError      a model or its tokenizer can't be used
├── BackendError    the ranks can't work together as asked
├── PlacementError  a rank does not run where it was planned to
├── CheckpointError a run can't be continued, or its state not be kept
└── TrainingError   training or writing its result failed

StoppedError        exit code 143: no failure, the run was told to end and can be resumed
"""

from __future__ import annotations


class SquadError(Exception):
    """A failure with a message for the user, and where possible a hint that names the fix."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class DatasetError(SquadError, ValueError):
    """The data can't be used: the message names the file, the record and what is wrong."""


class ModelError(SquadError):
    """The model can't be loaded, or does not fit the options."""


class BackendError(SquadError):
    """The ranks can't find each other, or a backend that was asked for is not there."""


class PlacementError(SquadError):
    """The rank's CPUs, threads or memory are not those that were planned; names both sides."""


class CheckpointError(SquadError):
    """A checkpoint can't be written, read, or continued with these options."""


class TrainingError(SquadError):
    """Training went wrong, or its result can't be written."""


class StoppedError(Exception):
    """SIGTERM ended the run in good order, on all ranks after the same step."""


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, or its type's name where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
