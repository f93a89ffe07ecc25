"""``python -m worker.supervisor``: run a job from start to end on the first node that the queue assigned.

It runs mpirun in the job's folder, whose output is the log on that node, and writes ``end.json`` on the
head. On SIGTERM, the ranks save a checkpoint and exit. ``python -m worker.supervisor CODE`` finishes the job
of a supervisor that was killed; CODE is its shell's exit code.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from ..runtime.process import STOPPED
from .attempt import (
    SUCCEEDED,
    Attempt,
    choose_copy_limit,
    conclude,
    describe,
    describe_dead,
    find_cause,
)
from .commands import REQUEUED, SlurmJob
from .deadline import DeadlineWatch
from .head import HeadFolder
from .launch import BEGIN, CANCELLED, END, SECRETS, Launch, parse_launch
from .nodes import prepare, send_end
from .staging import stage_data
from .storing import Storing
from .watch import LogWatch, NoticeWatch, announce

_LOG = Path("log")
# Higher exit codes of a shell mean killed processes.
_MOST = 128


def main() -> int:
    """Run one attempt of the job, or finish a killed one. Returns its exit code, at most :data:`_MOST`."""
    launch, job = parse_launch(sys.stdin.read()), SlurmJob.from_environ()
    head = HeadFolder(
        launch.folder, "" if job.nodes[0] == launch.head else launch.head, _LOG, job.nodes[0]
    )
    size = _LOG.stat().st_size
    deadline = DeadlineWatch(
        launch.spec.ending.until_done, max_time_s=launch.spec.ending.max_time_s
    )
    watches = LogWatch(_LOG, size), NoticeWatch(job.drained_nodes)
    attempt = Attempt(launch, job, *watches, deadline=deadline)
    code = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    try:
        code = _conclude_for(code, attempt, head) if code else _attempt(attempt, head)
    except Exception:
        traceback.print_exc()
        code = _conclude_for(1, attempt, head)
    return min(code, _MOST)


def _attempt(attempt: Attempt, head: HeadFolder) -> int:
    if end := head.read(END):
        announce(event="note", text="the job had ended before Slurm lost one of its nodes")
        head.remove(SECRETS)
        _store(end, attempt, head)
        return 0
    launch, job, size = attempt.launch, attempt.job, attempt.watch.offset
    # A background shell ignores it, and the ranks would inherit that.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, lambda *_: attempt.stop())
    began = _begin(launch, job, head)
    head.copy_log(size)
    attempt.deadline.first = float(str(began["first"]))
    attempt.deadline.start()
    if late := attempt.deadline.find_end():
        attempt.leaving = late
        announce(event="note", text=f"{late['message']}; the job does not start")
        return _finish(STOPPED, attempt, head, began)
    attempt.launch, copier = prepare(launch, job, lambda: attempt.notices.found)
    attempt.notices.start()
    storing = Storing(launch, head, job.nodes)
    storing.start()
    if attempt.launch.again:
        copier.start()
    code = stage_data(attempt, head) or attempt.run()
    limit_s = choose_copy_limit(code, job.fate())
    copier.finish(limit_s)
    storing.stop(limit_s)
    return _finish(code, attempt, head, began)


def _conclude_for(code: int, attempt: Attempt, head: HeadFolder) -> int:
    """Finish an attempt whose supervisor ended with this exit code."""
    if head.read(END):
        return code
    attempt.kill_rest()
    # If the supervisor was killed, the program is not to blame: the job may run again.
    began = head.read(BEGIN)
    node = [*began.get("nodes", []), *attempt.job.nodes][0]
    attempt.stopping, attempt.leaving = True, describe_dead(code, node, os.environ.get("SPR_ENDED"))
    attempt.watch.offset = max(0, attempt.watch.offset - 1)
    attempt.watch.poll()
    head.copy_log(_LOG.stat().st_size)
    return _finish(code, attempt, head, {"attempt": attempt.job.attempt, **began})


def _finish(code: int, attempt: Attempt, head: HeadFolder, began: dict[str, object]) -> int:
    """Requeue the job, or write its outcome."""
    end = conclude(code, attempt, cancelled=head.exists(CANCELLED))
    if end is None and _start_again(attempt, head, began):
        return code
    end = end or conclude(code, attempt, last=True) or {}
    content, launch = {**began, "ended": time.time(), **end}, attempt.launch
    succeeded = content["state"] == SUCCEEDED
    if succeeded:
        head.send_results()  # while Slurm may still start the job again
    attempt.job.keep_from_requeueing()
    # Slurm kills this process 30 s after the loss of a node, and soon if the job is canceled.
    signal.signal(signal.SIGTERM, lambda *_: _write_end(content, head))
    if content["state"] == CANCELLED or attempt.job.fate():
        _write_end(content, head)
    if not succeeded:
        head.send_results()
    send_end(launch.folder, [n for n in launch.pinning if n != launch.head], json.dumps(content))
    head.remove(SECRETS)
    _store(content, attempt, head)
    return code


def _store(content: dict[str, Any], attempt: Attempt, head: HeadFolder) -> None:
    """Write the job's end on the head, after its results are in its bucket, if it has one."""
    nodes = content.get("nodes") or attempt.job.nodes
    storing = Storing(attempt.launch, head, nodes)
    why = storing.finish()
    storing.run_command(content["state"])
    head.finish(results=False)
    # Last and on the head: others wait for this file.
    _write_end({**content, "push_error": why or None}, head)
    # This file and the last lines of the log.
    if not why and (late := storing.store()[1]):
        head.write(END, {**content, "push_error": late})


def _write_end(content: dict[str, object], head: HeadFolder) -> None:
    """Write the job's end; no SIGTERM writes it again."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    head.write(END, content)


def _begin(launch: Launch, job: SlurmJob, head: HeadFolder) -> dict[str, object]:
    """Write on the head when and where this attempt runs; return the content."""
    if 0 < launch.spec.recovery.retries < job.attempt:
        job.keep_from_requeueing()
    last, now = head.read(BEGIN) if job.attempt > 1 else {}, time.time()
    if job.attempt > 1:
        if not last.get("message") and last.get("nodes"):
            # Its batch script could not report what happened.
            text = f"the last attempt was lost with {last['nodes'][0]}, the first of its nodes"
            announce(event="note", text=text)
        announce(event="restarted", attempt=job.attempt, nodes=job.nodes)
    began: dict[str, object] = {
        "began": now,
        "first": last.get("first", now),
        "nodes": job.nodes,
        "ranks_per_node": launch.nproc_per_node,
        "attempt": job.attempt,
    }
    head.write(BEGIN, began)
    head.reserve(BEGIN, END)
    return began


def _start_again(attempt: Attempt, head: HeadFolder, began: dict[str, object]) -> bool:
    """Print the reason and requeue the job, unless Slurm has; return whether it is queued."""
    job, cause = attempt.job, find_cause(attempt)
    text = f"{describe(cause) or 'a rank or node was lost'}; the job will run again"
    cut = attempt.watch.ends_amid_line
    announce(amid_line=cut, event="note", text=f"attempt {job.attempt} ended: {text}")
    known = {name: cause.get(name) for name in ("rank", "host", "message")}
    head.write(BEGIN, {**began, **known})
    head.remove(END)  # only its program can have written it
    head.finish(results=False)
    # Slurm also ends this process and the child that requests it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return job.fate() == REQUEUED or job.requeue()


if __name__ == "__main__":
    sys.exit(main())
