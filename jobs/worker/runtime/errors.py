"""Failures with a one-line explanation. Any other exception is a bug and shows its traceback."""

from __future__ import annotations

import os

LARGER_DISKS = "remove files; only a new cluster can have larger disks (`up --volume-gib`)"
MORE_SPACE = "free space on the file system or, on Kubernetes, a larger claim"
"""For a full disk that is not a node's of ours."""


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


def hub_hint(error: BaseException | None, name: str, otherwise: str, kind: str = "") -> str:
    """Return a hint for a failed download of ``name`` from the hub, which hides private ones from strangers.

    ``kind`` is "datasets/" for data. ``otherwise`` is for failures that are not about access.
    """
    refusals = set()
    while error is not None:
        refusals |= {_refusal(error)} - {""}
        error = error.__cause__ or error.__context__
    has_token = bool(os.environ.get("HF_TOKEN"))
    page = f"{os.environ.get('HF_ENDPOINT') or 'https://huggingface.co'}/{kind}{name}"
    if "gated" in refusals and has_token:
        return f"it is gated, and the login in HF_TOKEN has no access: request it on {page}"
    if "gated" in refusals:
        return f"it is gated: request access on {page}, and send your login with --env HF_TOKEN"
    if refusals and has_token:
        return "check the name, and whether the login in HF_TOKEN may read it"
    if refusals:
        return "check the name; if it is private or gated, send your login with --env HF_TOKEN"
    return otherwise


def _refusal(error: BaseException) -> str:
    """Return why the hub refused: "gated", or "hidden" for what is private or missing; "" for neither.

    By the names of the libraries' types, because their texts change, and both kinds of text say "gated".
    """
    names = {each.__name__ for each in type(error).__mro__}
    if "DatasetNotFoundError" in names:  # datasets hides the hub's error
        return "gated" if "is a gated dataset" in str(error) else "hidden"
    if "GatedRepoError" in names:
        return "gated"
    status = getattr(getattr(error, "response", None), "status_code", None)
    return "hidden" if "RepositoryNotFoundError" in names or status in (401, 403) else ""
