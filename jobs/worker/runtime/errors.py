"""Failures with a one-line explanation. Any other exception is a bug and shows its traceback."""

from __future__ import annotations


class WorkerError(Exception):
    """A failure, exit code 1, with a message for the user and, if possible, a hint that names the fix."""

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
    """Not a failure: SIGTERM stopped all ranks after the same step; exit code 143."""


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, or its type's name if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


_FORBIDDEN = ("gated", "private", "401 client error", "403 client error")


def hub_hint(error: BaseException, otherwise: str) -> str:
    """Return a hint for a failed download from the hub, which also hides private models from strangers."""
    known: BaseException | None = error
    while known is not None:
        text = str(known).lower()
        if any(word in text for word in _FORBIDDEN):
            return (
                "if it is private or gated, `--hub-token` lets the nodes use this machine's login, and "
                "access to a gated one is requested on its page on the hub"
            )
        known = known.__cause__ or known.__context__
    return otherwise
