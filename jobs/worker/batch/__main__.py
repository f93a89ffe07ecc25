"""``python -m worker.batch``: a job from its start to its end, on the first node that the queue gave it.

It runs mpirun in the job's folder, which becomes the log on that node, and leaves ``end.json`` on the head.
SIGTERM asks the ranks to save a checkpoint and to end.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

from .conclusion import conclude
from .head import HeadFolder
from .launch import BEGIN, CANCELLED, END, Launch, parse_launch
from .slurm import REQUEUED, SlurmJob
from .supervise import Attempt, LogWatch, announce

_LOG = Path("log")


def main() -> int:
    """Run one attempt of the job. Returns its exit code."""
    launch, job = parse_launch(sys.stdin.read()), SlurmJob.from_environ()
    size = _LOG.stat().st_size
    head = HeadFolder(launch.folder, "" if job.nodes[0] == launch.head else launch.head, _LOG)
    attempt = Attempt(launch.for_attempt(job.attempt), job, LogWatch(_LOG, size))
    signal.signal(signal.SIGTERM, lambda *_: attempt.stop())
    began = _begin(launch, job, head)
    head.copy_log(size)
    code = attempt.run()
    end = conclude(code, attempt, job, launch.retries, cancelled=head.exists(CANCELLED))
    head.finish()
    if end is None and (job.fate() == REQUEUED or job.requeue()):
        return code
    end = end or conclude(code, attempt, job, 0, cancelled=False)
    head.write(END, {**began, "ended": time.time(), **(end or {})})
    return code


def _begin(launch: Launch, job: SlurmJob, head: HeadFolder) -> dict[str, object]:
    """Write on the head when and where this attempt runs, and return that."""
    if job.attempt > launch.retries:
        job.keep_from_requeueing()
    if job.attempt > 1:
        announce(event="restarted", attempt=job.attempt, nodes=job.nodes)
    began: dict[str, object] = {
        "began": time.time(),
        "nodes": job.nodes,
        "ranks_per_node": launch.nproc_per_node,
        "attempt": job.attempt,
    }
    head.write(BEGIN, began)
    return began


if __name__ == "__main__":
    sys.exit(main())
