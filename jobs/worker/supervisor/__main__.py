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
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..runtime.process import STOPPED
from .attempt import SUCCEEDED, choose_copy_limit, conclude, describe, describe_dead, find_cause
from .commands import REQUEUED, SlurmJob
from .deadline import Deadline
from .head import HeadFolder
from .launch import BEGIN, CANCELLED, END, FIRST, LAUNCH, SECRETS, parse_launch
from .nodes import prepare, send_file
from .staging import stage_data
from .storing import Storing
from .transfers import Uploads
from .watch import LogWatch, announce
from .watcher import Watcher

_LOG = Path("log")
# In begin.json: what end.json will be once the results are stored.
_OUTCOME = "outcome"
# There, after an attempt: how long its last checkpoint took.
_CHECKPOINT_S = "checkpoint_s"
# Higher exit codes of a shell mean killed processes.
_MOST = 128


def main() -> int:
    """Run one attempt of the job, or finish a killed one. Returns its exit code, at most :data:`_MOST`."""
    launch, job = parse_launch(Path(LAUNCH).read_text()), SlurmJob.from_environ()
    head = HeadFolder(
        launch.folder, "" if job.nodes[0] == launch.head else launch.head, _LOG, job.nodes[0]
    )
    resumes = bool(launch.spec.recovery.resumed_job)
    deadline = Deadline(launch.spec.ending, len(launch.pinning), resumes=resumes)
    watcher = Watcher(launch, job, LogWatch(_LOG, _LOG.stat().st_size), deadline)
    supervisor = Supervisor(watcher, head)
    signal.signal(signal.SIGTERM, lambda *_: supervisor.on_term())
    # A background shell ignores it, and the ranks would inherit that.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    code = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    try:
        code = supervisor.finish_killed(code) if code else supervisor.attempt()
    except Exception:
        traceback.print_exc()
        code = supervisor.finish_killed(1)
    return min(code, _MOST)


@dataclass
class Supervisor:
    """One attempt of a job, on its first node: its begin, its end or its return to the queue."""

    watcher: Watcher
    head: HeadFolder
    began: dict[str, Any] = field(default_factory=dict)
    """The content of ``begin.json``."""

    def __post_init__(self) -> None:
        self.on_term: Callable[[], object] = self.watcher.stop
        """What SIGTERM does now; at first, the ranks save a checkpoint and exit."""

    def attempt(self) -> int:
        """Run the job and return its exit code."""
        watcher, head, launch = self.watcher, self.head, self.watcher.launch
        size = watcher.log.offset
        if end := head.read(END) or head.read(BEGIN).get(_OUTCOME):
            head.copy_log(size)
            announce(event="note", text="the job had ended before Slurm lost one of its nodes")
            self._close(end)
            return 0
        self._begin()
        head.copy_log(size)
        watcher.deadline.starts = self.began["starts"]
        watcher.lifetime.ask()
        if late := watcher.deadline.find_end(measured_s=watcher.log.measured_s):
            watcher.leaving = late
            announce(event="note", text=f"{late['message']}; the job does not start")
            return self._finish(STOPPED)
        watcher.launch, copies = prepare(launch, watcher.job, lambda: watcher.notices)
        watcher.transfers = [*copies, *([Uploads(launch)] if launch.bucket else [])]
        code = stage_data(watcher, head) or watcher.run()
        watcher.settle(choose_copy_limit(code, watcher.job.fate(), watcher.log.checkpoint_s))
        return self._finish(code)

    def finish_killed(self, code: int) -> int:
        """Finish the attempt of a supervisor that ended with this exit code."""
        if self.head.read(END):
            return code
        watcher = self.watcher
        watcher.kill_rest()
        # Without the record of its beginning, the job's end would name neither nodes nor earlier attempts.
        self.head.wait(watcher.job.fate)
        # If the supervisor was killed, the program is not to blame: the job may run again.
        self.began = {"attempt": watcher.job.attempt, **self.head.read(BEGIN)}
        if outcome := self.began.get(_OUTCOME):
            self.head.copy_log(_LOG.stat().st_size)
            self._close(outcome)
            return 0 if outcome["state"] == SUCCEEDED else code
        node = [*self.began.get("nodes", []), *watcher.job.nodes][0]
        watcher.stop()
        watcher.leaving = describe_dead(code, node, os.environ.get("SPR_ENDED"))
        watcher.log.offset = max(0, watcher.log.offset - 1)
        watcher.log.poll()
        self.head.copy_log(_LOG.stat().st_size)
        return self._finish(code)

    def _begin(self) -> None:
        """Write on the head when and where this attempt runs."""
        launch, job, now = self.watcher.launch, self.watcher.job, time.time()
        if 0 < launch.spec.recovery.retries < job.attempt:
            job.keep_from_requeueing()
        # On a new head, Slurm counts a job's attempts from 1 again.
        last = self.head.read(BEGIN if job.attempt > 1 else FIRST)
        if job.attempt > 1:
            if not last.get("message") and last.get("nodes"):
                # Its batch script could not report what happened.
                text = f"the last attempt was lost with {last['nodes'][0]}, the first of its nodes"
                announce(event="note", text=text)
            announce(event="restarted", attempt=job.attempt, nodes=job.nodes)
            self.watcher.log.measured_s = float(last.get(_CHECKPOINT_S) or 0.0)
        starts = [*last.get("starts", []), [now, len(job.nodes)]]
        known = {"first": starts[0][0], "starts": starts}
        self.began = {
            "began": now,
            **known,
            "nodes": job.nodes,
            "ranks_per_node": launch.nproc_per_node,
            "attempt": job.attempt,
        }
        self.head.write(BEGIN, self.began)
        self.head.reserve(BEGIN, END)
        if not last:
            self.head.write(FIRST, known)
            sent = (launch.folder, self._others(), FIRST, json.dumps(known))
            threading.Thread(target=send_file, args=sent, daemon=True).start()

    def _finish(self, code: int) -> int:
        """Requeue the job, or write its outcome."""
        head, job, ended = self.head, self.watcher.job, time.time()
        head.wait(job.fate, amid_line=bool(self.watcher.log.partial))
        end = conclude(code, self.watcher, cancelled=head.exists(CANCELLED))
        if end is None and self._start_again():
            return code
        end = end or conclude(code, self.watcher, last=True) or {}
        content = {**self.began, "ended": ended, **end}
        if content["state"] == SUCCEEDED or not self._hurries(content):
            head.send_results()  # while Slurm may still start the job again
        head.write(BEGIN, {**self.began, _OUTCOME: content})
        job.keep_from_requeueing()
        self._close(content)
        return code

    def _close(self, content: dict[str, Any]) -> None:
        """Bring a job with this outcome to its end, after its results are in its bucket, if it has one."""
        head, launch = self.head, self.watcher.launch
        # Slurm kills this process 30 s after the loss of a node, and soon if the job is canceled.
        self.on_term = lambda: self._write_end(content)
        if self._hurries(content):
            self._write_end(content)
            if content["state"] != SUCCEEDED:
                head.send_results()
        # So that a new head does not restart the job.
        text, forget = json.dumps(content), f"rm -f {SECRETS}"
        send_file(launch.folder, self._others(), END, text, before=forget)
        head.remove(SECRETS)
        nodes = content.get("nodes") or self.watcher.job.nodes
        storing = Storing(launch, head, nodes)
        why = storing.finish()
        storing.run_command(content["state"])
        head.finish()
        # Last and on the head: others wait for this file.
        self._write_end({**content, "push_error": why or None})
        # This file and the last lines of the log.
        if not why and (late := storing.store()[1]):
            head.write(END, {**content, "push_error": late})

    def _hurries(self, content: dict[str, Any]) -> bool:
        """Return whether Slurm ends this process soon."""
        return content["state"] == CANCELLED or bool(self.watcher.job.fate())

    def _others(self) -> list[str]:
        launch = self.watcher.launch
        return [name for name in launch.pinning if name != launch.head]

    def _write_end(self, content: dict[str, Any]) -> None:
        """Write the job's end; no SIGTERM writes it again."""
        self.on_term = lambda: None
        self.head.write(END, content)

    def _start_again(self) -> bool:
        """Print the reason and requeue the job, unless Slurm has; return whether it is queued."""
        job, cause = self.watcher.job, find_cause(self.watcher)
        text = f"{describe(cause) or 'a rank or node was lost'}; the job will run again"
        cut = bool(self.watcher.log.partial)
        announce(amid_line=cut, event="note", text=f"attempt {job.attempt} ended: {text}")
        known = {name: cause.get(name) for name in ("rank", "host", "message")}
        known[_CHECKPOINT_S] = self.watcher.log.measured_s
        self.head.write(BEGIN, {**self.began, **known})
        self.head.remove(END)  # only its program can have written it
        self.head.finish()
        # Slurm also ends this process and the child that requests it.
        self.on_term = lambda: os._exit(128 + signal.SIGTERM)
        return job.fate() == REQUEUED or job.requeue()


if __name__ == "__main__":
    sys.exit(main())
