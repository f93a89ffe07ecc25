"""Failures that a job explains in one line. Any other exception is a bug and shows its traceback.

WorkerError         exit code 1
├── DatasetError    a data file or hub dataset can't be used; also a ValueError
├── ModelError      a model or its tokenizer can't be used
├── BackendError    the ranks can't work together as requested
├── PlacementError  a rank does not run where it was planned to
├── CheckpointError a run can't be resumed, or its state can't be saved
└── TrainingError   training or writing its result failed

StoppedError        exit code 143: no failure; the run was asked to stop
"""

from __future__ import annotations


class WorkerError(Exception):
    """A failure with a message for the user and, if possible, a hint that names the fix."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class DatasetError(WorkerError, ValueError):
    """The data can't be used: the message names the file, the record, and the defect."""


class ModelError(WorkerError):
    """The model can't be loaded, or does not fit the options."""


class BackendError(WorkerError):
    """The ranks can't connect, or the requested backend is not available."""


class PlacementError(WorkerError):
    """The rank's CPUs, threads, or memory differ from the plan; the message names both sides."""


class CheckpointError(WorkerError):
    """A checkpoint can't be written, read, or resumed with these options."""


class TrainingError(WorkerError):
    """Training failed, or its result can't be written."""


class StoppedError(Exception):
    """SIGTERM stopped the run in good order, on all ranks after the same step."""


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, or its type's name if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
