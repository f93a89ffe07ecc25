"""What would be lost with the nodes: results, models, and checkpoints of jobs. Runs on the head.

`fetch` leaves the file ``fetched`` in a job's folder, and a copy in S3 leaves ``pushed.json``. `fetch`
downloads no checkpoints, which an unfinished job needs: ours, and those that transformers' Trainer leaves
beside the model.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

WAITING, RUNNING = "waiting", "running"
_STEP = re.compile(r"step-\d{6,}")
_OTHER = ("logs", "metrics")


class QueueError(Exception):
    """Slurm does not answer; the message is its own."""


def list_queue() -> dict[str, str]:
    """Return :data:`WAITING` or :data:`RUNNING` by job name. Raises :class:`QueueError`."""
    argv = ["squeue", "--noheader", "--array", "--format=%A|%T|%N|%r|%j"]
    try:
        done = subprocess.run(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=8, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise QueueError(str(error)) from None
    text = done.stdout.decode(errors="replace")
    if done.returncode:
        raise QueueError(" ".join(text.split()))
    rows = [line.split("|", 4) for line in text.splitlines() if line.count("|") >= 4]
    return {row[4]: WAITING if row[1] == "PENDING" else RUNNING for row in rows}


def read(path: Path) -> str:
    """Return a file's text; "" if there is none."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def modified(path: Path) -> float:
    """Return when a file was written; 0 if there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def find_loss(job: Path) -> str:
    """Return ``checkpoint``, ``checkpoints``, ``model``, or ``results``; "" if nothing would be lost."""
    output, pushed = job / "output", modified(job / "pushed.json")
    if not output.is_dir():
        return ""
    record, model = read(job / "job.json"), output / "model"
    if '"resumable": true' in record and not (output / "results.json").is_file():
        steps = [each for each in _list(output / "checkpoints") if _STEP.fullmatch(each.name)]
        if any(_has_newer(step, pushed) for step in steps):
            return "checkpoint"
    if '"state": "succeeded"' not in read(job / "end.json"):
        beside = [each for each in _list(model) if each.name.startswith("checkpoint-")]
        if any(_has_newer(each, pushed) for each in beside):
            return "checkpoints"
    safe = max(pushed, modified(job / "fetched"))
    # The workers may have written more.
    if not _has_newer(output, safe, _OTHER) and (safe or '"gather_output": true' not in record):
        return ""
    return "model" if (model / "config.json").is_file() else "results"


def _list(folder: Path) -> Iterator[Path]:
    return folder.iterdir() if folder.is_dir() else iter(())


def _has_newer(folder: Path, since: float, without: tuple = ()) -> bool:  # type: ignore[type-arg]
    """Return whether a folder has a file that was written after a time."""
    for where, folders, files in os.walk(folder):
        if where == str(folder):
            folders[:] = [name for name in folders if name not in without]
        if where == f"{folder}/checkpoints":
            folders[:] = [name for name in folders if not _STEP.match(name)]
        for name in files:
            path = Path(where, name)
            if name != ".keep" and not path.is_symlink() and modified(path) > since:
                return True
    return False


def main() -> None:
    """Print what would be lost and the job's name, line by line; ``queue`` and why if it is unknown."""
    queue: dict[str, str] = {}
    try:
        queue = list_queue()
    except QueueError as error:
        print(f"queue {error}")
    for name, state in queue.items():
        print(state, name)
    for job in sorted(Path("~/spr-jobs").expanduser().glob("*/")):
        if job.name not in queue and not job.name.startswith(".") and (loss := find_loss(job)):
            print(loss, job.name)
