"""Events: lines with which a running job reports to the machine that submitted it.

Rank 0 prints JSON objects on standard output, one per line, each after :data:`PREFIX` and its job's mark,
as in ``@spr 5f3a91c2 {"event": "note", "text": "hello"}``. All other output, and an event without the mark
or without its fields, is log text: programs may print anything. Only ``error`` events, and notes about a
rank that is silent, come from any rank.

    start   world_size, hosts, backend, dtype, model, versions
    phase   name, such as load or train; when the phase begins
    resumed step, total; the step of the checkpoint that the run continues
    step    step, total, epoch, loss, lr; a few per second, and the last one. Also the latest speed of all
            ranks, samples_per_second and tokens_per_second (without padding), the resulting eta_seconds,
            and the hosts' shares of the computing power
    evaluating  step, total; the evaluation of the model while training begins
    evaluation  step, total, scores, metric and score (the one that chooses the best model), best (whether
            this is the best so far), best_score, best_step, seconds; the model was evaluated while training
    checkpoint  step, name, seconds; one was written. In a study, step is the number of ended trials, and
            there is eta_seconds
    checkpoint_estimate  seconds; how long the first checkpoint may take, if that is long
    stopped step, total, checkpoint (its name); after a SIGTERM, before exit code 143
    note    text
    trial   samples_per_second, steps, seconds; what a trial (--trial-seconds) measured
    result  the content of results.json
    running a program of `run` starts
    elements done, failed, total; how many elements of an array have ended
    error   message, hint, rank, host, lost_peer (true if this rank only saw the effect of another
            rank's failure)

Each has ``at``, the time in seconds since 1970. When a job begins again after the loss of a rank or node,
its batch script adds ``restarted``, with attempt and nodes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

PREFIX = "@spr "
MARK = "SPR_MARK"
"""The environment variable that gives batch process and ranks their job's mark."""
NAMES = "SPR_NAMES"
"""The environment variable with the user's names of files, by their paths in the job's folder, as JSON."""
STEP_SECONDS = 0.25
"""Minimum time between ``step`` events, so that fast steps do not flood the terminal."""


def mark_of(job: str) -> str:
    """Return the mark of a job's events, derived from its ID."""
    return hashlib.sha256(job.encode()).hexdigest()[:8]


def render_event(fields: Mapping[str, object], mark: str = "") -> str:
    """Return an event as a line, without its end. Raises ``ValueError`` for a number that JSON lacks."""
    return f"{prefix_of(mark)}{json.dumps(fields, allow_nan=False)}"


def prefix_of(mark: str) -> str:
    """Return the prefix of a job's events."""
    return f"{PREFIX}{mark} " if mark else PREFIX


def _names() -> dict[str, str]:
    found: dict[str, str] = json.loads(os.environ.get(NAMES, "{}"))
    return found


def name_files(text: str) -> str:
    """Return a text with the user's names of the data files."""
    return _replace(text, _names())


def _replace(text: str, names: Mapping[str, str]) -> str:
    """Replace paths, but not in a name that is there already, such as ``mine/data/train.csv``."""
    for path, name in names.items():
        text = re.sub(rf"(?<![\w./-]){re.escape(path)}", name.replace("\\", r"\\"), text)
    return text


class Events:
    """Prints one rank's events; ranks other than 0 print only errors and warnings."""

    def __init__(
        self,
        rank: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        mark: str = "",
    ) -> None:
        self.rank = rank
        self.mark = mark
        self._names = _names()
        self._stream = stream
        self._clock = clock
        self._last_step: float | None = None
        self.observe: Callable[[str, Mapping[str, Any]], None] | None = None
        """Receives each event that :meth:`emit` prints."""

    def emit(self, event: str, **fields: object) -> None:
        """Print one event, on rank 0. Raises ``ValueError`` for a number that JSON lacks."""
        if self.rank == 0:
            self._write({"event": event, **fields})
            if self.observe:
                self.observe(event, fields)

    def note(self, text: str) -> None:
        """Print one line for the user."""
        self.emit("note", text=text)

    def warn(self, text: str) -> None:
        """Print one line for the user, from any rank."""
        self._write({"event": "note", "text": text})

    def step(self, step: int, total: int, **fields: object) -> None:
        """Print a finished step, unless one was printed very recently."""
        now = self._clock()
        recent = self._last_step is not None and now - self._last_step < STEP_SECONDS
        if step < total and recent:
            return
        self._last_step = now
        self.emit("step", step=step, total=total, **fields)

    def error(
        self, message: str, hint: str | None = None, *, lost_peer: bool = False, **more: object
    ) -> None:
        """Print why this rank fails, on any rank."""
        place = {"rank": self.rank, "host": socket.gethostname(), "lost_peer": lost_peer}
        self._write({"event": "error", "message": message, "hint": hint, **place, **more})

    def _write(self, fields: dict[str, object]) -> None:
        # One write per line: mpirun merges the ranks' output as it comes. (Tests replace sys.stdout.)
        stream = self._stream or sys.stdout
        named = {
            name: _replace(each, self._names) if isinstance(each, str) else each
            for name, each in fields.items()
        }
        line = render_event({**named, "at": round(time.time(), 1)}, self.mark)
        stream.write(f"{line}\n")
        stream.flush()


def take_mark() -> str:
    """Return the mark of this process's job and hide it from child processes."""
    return os.environ.pop(MARK, "")


def parse_event(line: str, mark: str = "") -> dict[str, Any] | None:
    """Return the event in a line of a job's output, or None for log text.

    Text before the prefix is skipped: it may be another rank's unfinished line. Ranks that were started
    without a job have no ``mark``.
    """
    _, found, text = line.partition(prefix_of(mark))
    if not found:
        return None
    try:
        event = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return event if is_valid(event) else None


def is_valid(event: Any) -> bool:
    """Return whether an event has the fields of its kind."""
    if not isinstance(event, dict):
        return False
    fields = _FIELDS.get(str(event.get("event")))
    if fields is None:
        return False
    known = {name: check for name, check in _OPTIONAL.items() if name in event}
    return all(name in event and check(event[name]) for name, check in {**known, **fields}.items())


def _is_text(value: Any) -> bool:
    # A lone surrogate can't be printed.
    return isinstance(value, str) and not any("\ud800" <= each <= "\udfff" for each in value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 53


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e15


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _or_none(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


_SPEED = ("samples_per_second", "tokens_per_second", "eta_seconds")
_STEP: dict[str, Callable[[Any], bool]] = {
    "step": _is_count,
    "total": lambda value: _is_count(value) and value > 0,
}
_FIELDS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "start": {"world_size": _is_count, "hosts": _are_texts, "backend": _is_text, "dtype": _is_text},
    "phase": {"name": _is_text},
    "resumed": _STEP,
    "step": {
        **_STEP,
        **dict.fromkeys(("epoch", "loss", *_SPEED), _is_number),
        "shares": lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
    },
    "evaluating": _STEP,
    "evaluation": {
        **_STEP,
        "scores": lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
        "metric": _is_text,
        "best_step": _is_count,
        **dict.fromkeys(("score", "best_score"), _is_number),
        "best": lambda value: isinstance(value, bool),
    },
    "checkpoint": {"step": _is_count, "name": _is_text},
    "checkpoint_estimate": {"seconds": _is_number},
    "stopped": {**_STEP, "checkpoint": _is_text},
    "note": {"text": _is_text},
    "trial": {"samples_per_second": _is_number, "steps": _is_count, "seconds": _is_number},
    "result": {},
    "running": {},
    "elements": {"done": _is_count, "failed": _is_count, "total": _is_count},
    "restarted": {"attempt": _is_count, "nodes": _are_texts},
    "error": {"message": _is_text},
}
_OPTIONAL: dict[str, Callable[[Any], bool]] = {
    "at": _is_number,
    "hint": _or_none(_is_text),
    "rank": _or_none(_is_count),
    "host": _or_none(_is_text),
    "lost_peer": lambda value: isinstance(value, bool),
    "exit_code": _is_count,
}
