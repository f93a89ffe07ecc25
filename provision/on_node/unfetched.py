"""What would be lost with the nodes: results, models, and checkpoints of jobs. Runs on the head.

`fetch` leaves the file ``fetched`` in a job's folder, and a copy in S3 leaves ``pushed.json``. All files in
``output`` are the user's; of those in ``work``, the code that came with the job knows which are. `fetch`
downloads no checkpoints of ours, which an unfinished job needs.
"""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path

WAITING, RUNNING, STALLED = "waiting", "running", "waiting for lost nodes"
# As in idle.sh.
_LOST = (
    "ReqNodeNotAvail",
    "Nodes required for job are DOWN",
    "PartitionNodeLimit",
    "PartitionConfig",
)
PENDING = "PENDING"
LIST_QUEUE = ["squeue", "--noheader", "--array", "--format=%A|%T|%N|%r|%j"]
"""Prints the queue, a line per job."""


class QueueError(Exception):
    """Slurm does not answer; the message is its own."""


def list_queue() -> dict[str, str]:
    """Return :data:`WAITING`, :data:`RUNNING`, or :data:`STALLED` by job name. Raises :class:`QueueError`."""
    try:
        done = subprocess.run(
            LIST_QUEUE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=8, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise QueueError(str(error)) from None
    text = done.stdout.decode(errors="replace")
    if done.returncode:
        raise QueueError(" ".join(text.split()))
    found = {}
    for _, state, _, reason, name in split_queue(text):
        waits = STALLED if reason.startswith(_LOST) else WAITING
        found[name] = waits if state == PENDING else RUNNING
    return found


def split_queue(text: str) -> list[list[str]]:
    """Return each job's number, state, nodes, reason, and name in the output of :data:`LIST_QUEUE`."""
    return [line.split("|", 4) for line in text.splitlines() if line.count("|") >= 4]


def read(path: Path) -> str:
    """Return a file's text; "" if there is none."""
    with suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def modified(path: Path) -> float:
    """Return when a file was written; 0 if there is none."""
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def find_loss(job: Path) -> str:
    """Return ``checkpoint``, ``model``, or ``results``; "" if nothing would be lost."""
    output, state, pushed = job / "output", job / "output.state", modified(job / "pushed.json")
    record = read(job / "job.json")
    is_unfinished = '"resumable": true' in record and not (output / "results.json").is_file()
    if is_unfinished and _has_newer(state / "checkpoints", pushed):
        return "checkpoint"
    safe = max(pushed, modified(job / "fetched"))
    is_lost = any(_has_newer(job / name, safe) for name in ("output", "workers"))
    # The workers may have written more.
    is_lost = is_lost or (not safe and '"gather_output": true' in record)
    if not is_lost and (state / "started").exists():
        # First the times: a program for each of hundreds of jobs would take longer than `down` waits.
        is_lost = _has_newer(job / "work", safe) and _has_newer_work(job, safe)
    if not is_lost:
        return ""
    return "model" if (output / "model/config.json").is_file() else "results"


def _has_newer(folder: Path, since: float) -> bool:
    """Return whether a folder has a file that was written after a time, or can't be read."""
    failed = []  # type: ignore[var-annotated]
    for where, _, files in os.walk(str(folder), onerror=failed.append):
        for name in files:
            with suppress(OSError):
                if Path(where, name).lstat().st_ctime > since:
                    return True
    return any(not isinstance(error, FileNotFoundError) for error in failed)


def _has_newer_work(job: Path, since: float) -> bool:
    program = job / "code/worker/storage/ownership.py"
    options = json.dumps({"folder": str(job), "since": since})
    try:
        done = subprocess.run(
            ["python3", "-I", "-S", str(program), options],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return not since  # its code is incomplete
    return bool(done.stdout.strip())


def main() -> None:
    """Print what would be lost and the job's name, line by line; ``queue`` and why if it is unknown."""
    queue: dict[str, str] = {}
    print()  # startup files may print a terminal's title, without a newline
    try:
        queue = list_queue()
    except QueueError as error:
        print(f"queue {error}")
    for name, state in queue.items():
        print(WAITING if state == STALLED else state, name)
    for job in sorted(Path("~/spr-jobs").expanduser().glob("*/")):
        if job.name not in queue and not job.name.startswith(".") and (loss := find_loss(job)):
            print(loss, job.name)
