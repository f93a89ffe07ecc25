"""The queue, and the progress in running jobs' logs. Runs on the head: see :mod:`jobs.top.relay`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from jobs.worker.runtime.events import mark_of, parse_event
from jobs.worker.supervisor.listing import spending

CONNECTING = "connecting"
"""The error while there is no answer yet."""
_ANSWER_S = 10
_LISTED_JOBS = 100
_LOG_BYTES = 65536
_STEP = ("step", "total", "loss", "samples_per_second", "eta_seconds")
_KEPT = {
    "step": {name: name for name in _STEP},
    "phase": {"name": "phase"},
    "evaluation": {name: name for name in ("metric", "score", "best_score", "best_step")},
}
"""By event: the fields that are kept, and their names here."""
_PHASES = {"running": "running", "elements": "{done} of {total} done, {failed} failed"}
"""By event: the phase that it begins, of a job that need not train."""


def read_queue(argv: list[str]) -> dict[str, Any]:
    """Query the queue; the answer says why if that fails."""
    try:
        done = subprocess.run(
            ["timeout", str(_ANSWER_S), *argv],  # it outlives this process if that is killed
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
    except OSError as error:
        return no_queue(str(error))
    lines = done.stdout.decode(errors="replace").splitlines()
    if code := done.returncode:
        said = f": {lines[-1] if lines else f'ended with {code}'}"
        known = {124: " does not answer", 127: " is not installed on the head"}
        return no_queue(f"{argv[0]}{known.get(code, said)}")
    rows = [row for row in map(parse_queue_line, lines) if row]
    rows.sort(key=lambda row: row["state"] == "PENDING")
    return {"queue": rows[:_LISTED_JOBS], "queued": len(rows), "queue_error": ""}


def no_queue(why: str) -> dict[str, Any]:
    """Return the answer while the queue is unknown."""
    return {"queue": [], "queued": 0, "queue_error": why}


def parse_queue_line(line: str) -> dict[str, Any] | None:
    """Parse a line of ``squeue -o '%A|%j|%T|%M|%D|%C|%N|%r'``; a job's name may contain anything."""
    number, _, rest = line.partition("|")
    parts = rest.rsplit("|", 6)
    if len(parts) != 7 or not (parts[3].isdecimal() and parts[4].isdecimal()):
        return None
    name, state, passed, nodes, cores, where, reason = parts
    row = {"id": number, "name": name, "state": state, "passed": passed}
    return {**row, "nodes": int(nodes), "cores": int(cores), "where": where, "reason": reason}


class LogTail:
    """Reads the last events in a job's log, at a cost that does not depend on the log's length."""

    def __init__(self, path: str, mark: str = "") -> None:
        self._path, self._offset, self._mark = path, 0, mark
        self._known: dict[str, Any] = {}

    def look(self, now: float) -> dict[str, Any]:
        """Return the fields of the last step and evaluation, and the phase; nothing without a log."""
        try:
            found = os.stat(self._path)  # noqa: PTH116
            if found.st_size < self._offset:
                self._offset, self._known = 0, {}
            if found.st_size > self._offset:
                self._read(found.st_size)
        except OSError:
            return {}
        return {**self._known, "age_s": round(max(0.0, now - found.st_mtime), 1)}

    def _read(self, size: int) -> None:
        with open(self._path, "rb") as file:  # noqa: PTH123
            # Also the first new lines: a program that is running says so only once.
            for start in sorted({self._offset, max(self._offset, size - _LOG_BYTES)}):
                at = file.seek(start)
                text = file.read(_LOG_BYTES)
                self._take(text.decode(errors="replace"))
        self._offset = at + text.rfind(b"\n") + 1  # a line that is being written is read again

    def _take(self, text: str) -> None:
        for line in text.split("\n"):
            event = parse_event(line, self._mark) or {}
            kind = event.get("event", "")
            names = _KEPT.get(kind, {})
            self._known.update({new: event[old] for old, new in names.items()})
            if kind in _PHASES:
                self._known["phase"] = _PHASES[kind].format_map(event)


class JobLogs:
    """The logs of running jobs."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._tails: dict[str, LogTail] = {}

    def look(self, jobs: set[str], now: float) -> list[dict[str, Any]]:
        """Return each job's progress from its log."""
        known = self._tails
        self._tails = {
            job: known.get(job) or LogTail(f"{self._folder}/{job}/log", mark_of(job))
            for job in sorted(jobs)
        }
        return [
            {"job": job, **tail.look(now), **spending(Path(self._folder, job))}
            for job, tail in self._tails.items()
        ]
