"""The jobs that are on a cluster's head: what became of them, and how much they left there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timezone

from infra.errors import JobError, UsageError
from provision.host import Host

RUNNING, DONE, FAILED, LOST = "running", "done", "failed", "lost"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# A line a job: begin, end (or -), pid alive (0 or 1), exit code (or -), has a model, training (finished,
# unfinished or -), newest checkpoint (or -), KiB, name. A pid may belong to anybody after a restart of
# the node, so its command line is asked, too. A checkpoint is one when its folder has its final name.
_SCRIPT = r"""# listing the jobs
for d in ~/spr-jobs/*/; do
  [ -d "$d" ] || continue
  d=${d%/}; begin=$d/run.sh; [ -e "$begin" ] || begin=$d
  end=-; code=-; alive=0; model=0
  if [ -f "$d/exit" ]; then end=$(stat -c %Y "$d/exit"); code=$(cat "$d/exit")
  elif [ -s "$d/pid" ] && grep -qs "$d" "/proc/$(cat "$d/pid")/cmdline"; then alive=1; fi
  [ -f "$d/output/model/config.json" ] && model=1
  training=-; [ -f "$d/start.json" ] && training=unfinished
  [ $training = unfinished ] && [ -f "$d/output/results.json" ] && training=finished
  step=$(ls "$d/output/checkpoints" 2>/dev/null | grep -x 'step-[0-9]*' | sort -V | tail -n 1)
  echo "$(stat -c %Y "$begin") $end $alive ${code:--} $model $training ${step:--}" \
    "$(du -sk "$d" | cut -f1) $(basename "$d")"
done
"""


@dataclass(frozen=True)
class JobSummary:
    """One job. ``ended`` and ``exit_code`` are ``None`` while it runs, and where nobody knows.

    ``state``: running, done, failed, or lost: it ended without an exit code, as when the node was
    shut down. ``checkpoint`` is the newest one's name, "" for none; ``unfinished`` is a training
    job that `train squad --resume` can go on with.
    """

    job: str
    state: str
    exit_code: int | None
    began: datetime
    ended: datetime | None
    size_kib: int
    has_model: bool
    checkpoint: str = ""
    unfinished: bool = False

    def as_dict(self) -> dict[str, object]:
        """The job for ``--json``."""
        return {
            "job": self.job,
            "state": self.state,
            "exit_code": self.exit_code,
            "began": self.began.isoformat(),
            "ended": self.ended.isoformat() if self.ended else None,
            "size_kib": self.size_kib,
            "has_model": self.has_model,
            "checkpoint": self.checkpoint or None,
            "unfinished": self.unfinished,
        }


def list_jobs(head: Host) -> tuple[JobSummary, ...]:
    """The jobs of a head, oldest first."""
    return parse_jobs(head.run(_SCRIPT).stdout)


def parse_jobs(text: str) -> tuple[JobSummary, ...]:
    """The jobs in what the head's script has printed, oldest first."""
    rows = (line.split(" ", 8) for line in text.splitlines() if line.count(" ") >= 8)
    return tuple(sorted(map(_parse, rows), key=lambda job: (job.began, job.job)))


def _parse(row: list[str]) -> JobSummary:
    begin, end, alive, code, model, training, step, size, name = row
    exit_code = int(code) if code.lstrip("-").isdigit() else None
    state = DONE if exit_code == 0 else FAILED
    if exit_code is None:
        state = RUNNING if alive == "1" else LOST
    return JobSummary(
        job=name,
        state=state,
        exit_code=exit_code,
        began=_time(begin),
        ended=None if end == "-" else _time(end),
        size_kib=int(size),
        has_model=model == "1",
        checkpoint="" if step == "-" else step,
        unfinished=training == "unfinished",
    )


def _time(seconds: str) -> datetime:
    return datetime.fromtimestamp(int(seconds), timezone.utc)


def check_job_id(job: str) -> None:
    """Raises :class:`UsageError` for what can't be a job's id: it becomes part of a command."""
    if not _NAME.fullmatch(job):
        raise UsageError(
            f"{job!r} is no job's id",
            hint="such as squad-20260731-142501; `spr-cluster jobs` lists them",
        )


def choose_job(jobs: tuple[JobSummary, ...], wish: str | None) -> JobSummary:
    """The job of that id, or the newest; raises :class:`UsageError` where there is none."""
    if not jobs:
        raise UsageError("there is no job on the head of this cluster")
    if wish is None:
        return jobs[-1]
    found = next((job for job in jobs if job.job == wish), None)
    if found is None:
        last = ", ".join(job.job for job in jobs[-5:])
        raise UsageError(f"there is no job {wish} on the head", hint=f"the last ones are {last}")
    return found


def newest_model(jobs: tuple[JobSummary, ...]) -> JobSummary:
    """The newest job that has a model; raises :class:`JobError` where none has."""
    having = [job for job in jobs if job.has_model]
    if not having:
        raise JobError("no job on this cluster has a model", hint="spr-cluster train squad")
    return having[-1]


def choose_unfinished(jobs: tuple[JobSummary, ...], wish: str | None, cluster: str) -> JobSummary:
    """The training job of that id, or the last unfinished one that has a checkpoint, or the last.

    Raises :class:`UsageError` where there is none, or it has nothing left to do.
    """
    unfinished = [job for job in jobs if job.unfinished]
    if wish is None and unfinished:
        # One that failed in its first seconds must not hide hours of work.
        return ([job for job in unfinished if job.checkpoint] or unfinished)[-1]
    if wish is None:
        raise UsageError(
            f"no unfinished training job on cluster {cluster}",
            hint="`spr-cluster train squad` starts one",
        )
    found = next((job for job in jobs if job.job == wish), None)
    if found is None:
        known = ", ".join(job.job for job in unfinished[-3:]) or "no other unfinished one"
        raise UsageError(f"no job {wish!r} on cluster {cluster}", hint=f"there is {known}")
    if not found.unfinished:
        raise UsageError(f"job {wish} has nothing to resume: it is finished, or no training")
    return found
