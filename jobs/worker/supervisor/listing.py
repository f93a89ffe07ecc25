"""Prints the jobs in ``~/spr-jobs``, one JSON object per line. It is sent to the head and run there by the
system's Python 3.8 or later."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from ..runtime.checkpoint_names import CHECKPOINTS, newest
from ..runtime.events import mark_of, prefix_of
from .commands import ask, find_missing
from .deadline import count_node_s

# Maximum time to copy a job's files, then for Slurm to accept the job.
_SENT_S, _QUEUED_S = 1800, 10
_TAIL = 1 << 16


def queued_jobs() -> dict[str, list[str]] | None:
    """Return Slurm's state, reason, and nodes of each job by name; None if Slurm does not answer."""
    text = ask(["squeue", "--noheader", "--format=%T|%r|%N|%j"])
    if text is None:
        return None
    rows = [line.split("|", 3) for line in text.splitlines() if line.count("|") >= 3]
    for row in rows:
        row[1] = find_missing(row[1])
    return {row[3]: row[:3] for row in rows}


def read(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; {} if there is none."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return dict(json.loads(path.read_text(encoding="utf-8")))
    return {}


def disk_kib(folder: Path) -> int:
    """Return the size of a folder."""
    blocks = 0
    for below, _, names in os.walk(str(folder)):
        for name in names:
            with contextlib.suppress(OSError):
                blocks += os.lstat(Path(below, name)).st_blocks
    return blocks // 2


def last_events(folder: Path) -> list[dict[str, Any]]:
    """Return the job's last events."""
    prefix = prefix_of(mark_of(folder.name))
    with contextlib.suppress(OSError, ValueError):
        with (folder / "log").open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL))
            lines = log.read().decode(errors="replace").split("\n")[:-1]
        return [json.loads(line[len(prefix) :]) for line in lines if line.startswith(prefix)]
    return []


def expected_end(own: list[dict[str, Any]]) -> float | None:
    """Return when training ends according to the last estimate, in seconds since 1970."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        # After its last step, a job evaluates: for how long is unknown.
        if own and own[-1]["event"] in ("step", "checkpoint", "evaluating"):
            for event in reversed(own):
                if "eta_seconds" in event:
                    return float(event["at"]) + float(event["eta_seconds"])
    return None


def describe_progress(own: list[dict[str, Any]]) -> str:
    """Return how many elements of an array have ended, such as ``37 of 100 done, 2 failed``."""
    with contextlib.suppress(KeyError, TypeError):
        for event in reversed(own):
            if event["event"] == "elements":
                return "{done} of {total} done, {failed} failed".format_map(event)
    return ""


def spending(folder: Path) -> dict[str, Any]:
    """Return the price per hour of a job's nodes, if it is known, its limits, and its last start.

    Its limits count ``spent_s`` and ``spent_usd`` as well: what its earlier attempts took, and the runs that
    it resumes.
    """
    record, begin = read(folder / "job.json"), read(folder / "begin.json")
    found: dict[str, Any] = {"spent_s": 0.0, "spent_usd": 0.0}
    if "began" in begin:
        found["began"] = begin["began"]
    with contextlib.suppress(KeyError, TypeError, AttributeError):  # of a damaged or missing file
        spent = record.get("more", {}).get("spent") or {"seconds": 0.0, "usd": 0.0}
        found.update(spent_s=spent["seconds"], spent_usd=spent["usd"])
        if ending := read_spec(folder, "ending"):
            limit_s = ending["max_time_s"]
            found.update(budget=ending["budget"], max_time_s=limit_s and limit_s + spent["seconds"])
        each = (record.get("usd_per_hour") or 0.0) * record.get("node_share", 1.0)
        if each:
            found["usd_per_hour"] = each * (record.get("run_nodes") or record["nnodes"])
        began, starts = begin["began"], begin["starts"]
        found["spent_s"] += began - starts[0][0]
        found["spent_usd"] += each * count_node_s(starts, began) / 3600
        if each:
            found["usd_per_hour"] = each * starts[-1][1]
    return found


def read_spec(folder: Path, part: str) -> dict[str, Any]:
    """Return a part of a job's value, as it was submitted last; {} if that is unknown."""
    with contextlib.suppress(KeyError, TypeError, ValueError):
        return dict(read(folder / "launch.json")["spec"][part])
    return {}


def is_on_lost_head(folder: Path) -> bool:
    """Whether a job that has ended left its files on an earlier head: this one has no log of it.

    Its first start, whose time all nodes have, is over; or only its end is here.
    """
    has_begun = (folder / "first.json").exists() or "began" in read(folder / "end.json")
    is_stub = not (folder / "job.json").exists()
    return (has_begun or is_stub) and not (folder / "log").exists()


def is_coming(folder: Path) -> bool:
    """Return whether a job is still being submitted: its files arrive before it is queued."""
    if (folder / "begin.json").exists() or (folder / "end.json").exists():
        return False
    # Its script is renamed to run.sh when Slurm has the job.
    is_sent = [path.name for path in folder.glob("run.sh*")] == ["run.sh"]
    return time.time() - folder.stat().st_mtime < (_QUEUED_S if is_sent else _SENT_S)


def describe(folder: Path, queue: dict[str, list[str]] | None) -> dict[str, object]:
    """Return one job's fields."""
    output = folder / "output"
    script = folder / "run.sh"
    record, events = read(folder / "job.json"), last_events(folder)
    return {
        "job": folder.name,
        "command": str(record.get("command", "")),
        "owner": str(record.get("owner", "")),
        "cores": record.get("cores"),
        "memory_gib": record.get("memory_gib"),
        "queue": None if queue is None else queue.get(folder.name, []),
        "submitted": int((script if script.exists() else folder).stat().st_mtime),
        "begin": read(folder / "begin.json"),
        "end": read(folder / "end.json"),
        "coming": is_coming(folder),
        "on_lost_head": is_on_lost_head(folder),
        "bucket": str(read_spec(folder, "storage").get("bucket") or ""),
        "cancelled": (folder / "cancelled").exists(),
        "has_model": any((output / "model").glob("*config.json")),  # or that of adapters
        "unfinished": record.get("resumable") is True and not (output / "results.json").exists(),
        "checkpoint": newest(folder.glob(f"output.state/{CHECKPOINTS}/*")) or None,
        "expected_end": expected_end(events) if queue and folder.name in queue else None,
        "progress": describe_progress(events),
        "size_kib": disk_kib(folder),
        **spending(folder),
    }


def main() -> None:
    known = queued_jobs()
    for each in sorted(Path.home().glob("spr-jobs/*/")):
        if each.is_dir():
            print(json.dumps(describe(each, known)))
