"""The jobs on a cluster's head: state, disk use, model, and newest checkpoint."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone

from infra.errors import JobError, UsageError
from provision.host import Host

RUNNING, DONE, FAILED, LOST = "running", "done", "failed", "lost"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# What the script prints; other lines, such as a banner's, are skipped.
_ROW = re.compile(
    r"(\d{1,10}) (\d{1,10}|-) ([01]) (\S+) ([01]) (finished|unfinished|-) (\S+) (\d{1,15}) "
    rf"({_NAME.pattern})"
)
# One line per job: begin, end (or -), PID alive (0 or 1), exit code (or -), has a model, training
# (finished, unfinished, or -), newest checkpoint (or -), KiB, name. After a reboot the PID may belong to
# another process, so its command line is checked, too. A checkpoint is complete once its folder has its
# final name.
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
    """One job. ``ended`` and ``exit_code`` are ``None`` while it runs, and if they are unknown.

    ``state`` is running, done, failed, or lost (ended without an exit code, for example because the
    node was shut down). ``checkpoint`` is the name of the newest one, "" for none. ``unfinished``
    means that `train squad --resume` can resume it.
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
        """Return the job for ``--json``."""
        began, ended = self.began.isoformat(), self.ended.isoformat() if self.ended else None
        times = {"began": began, "ended": ended}
        return {**asdict(self), **times, "checkpoint": self.checkpoint or None}


def list_jobs(head: Host) -> tuple[JobSummary, ...]:
    """Return the jobs on a head, oldest first."""
    return parse_jobs(head.run(_SCRIPT).stdout)


def parse_jobs(text: str) -> tuple[JobSummary, ...]:
    """Return the jobs in the output of the head's script, oldest first."""
    rows = (match.groups() for line in text.splitlines() if (match := _ROW.fullmatch(line)))
    return tuple(sorted(map(_parse, rows), key=lambda job: (job.began, job.job)))


def _parse(row: Sequence[str]) -> JobSummary:
    begin, end, alive, code, model, training, step, size, name = row
    exit_code = int(code) if code.isdecimal() else None
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
    """Raise :class:`UsageError` unless this can be a job ID: it becomes part of a command."""
    if not _NAME.fullmatch(job):
        raise UsageError(
            f"{job!r} is not a job ID",
            hint="expected one such as squad-20260731-142501-k3f; `spr-cluster jobs` lists them",
        )


def choose_job(jobs: tuple[JobSummary, ...], job_id: str | None) -> JobSummary:
    """Return the job with that ID, or the newest. Raises :class:`UsageError` if there is none."""
    if not jobs:
        raise UsageError("there is no job on the head of this cluster")
    return jobs[-1] if job_id is None else _find(jobs, job_id, jobs[-5:])


def _find(
    jobs: tuple[JobSummary, ...], job_id: str, candidates: Sequence[JobSummary]
) -> JobSummary:
    found = next((job for job in jobs if job.job == job_id), None)
    if found is None:
        names = ", ".join(job.job for job in candidates)
        hint = f"the last ones are {names}" if names else "`spr-cluster jobs` lists all jobs"
        raise UsageError(f"there is no job {job_id} on the head", hint=hint)
    return found


def newest_model(jobs: tuple[JobSummary, ...]) -> JobSummary:
    """Return the newest job that has a model. Raises :class:`JobError` if none has."""
    having = [job for job in jobs if job.has_model]
    if not having:
        raise JobError("no job on this cluster has a model", hint="`train squad` trains one")
    return having[-1]


def choose_unfinished(jobs: tuple[JobSummary, ...], job_id: str | None, cluster: str) -> JobSummary:
    """Return the training job with that ID; by default the last unfinished one.

    One with a checkpoint is preferred. Raises :class:`UsageError` if there is none, or it has nothing
    left to do.
    """
    unfinished = [job for job in jobs if job.unfinished]
    if job_id is None and unfinished:
        # A job that failed in its first seconds must not hide hours of work.
        return ([job for job in unfinished if job.checkpoint] or unfinished)[-1]
    if job_id is None:
        raise UsageError(
            f"no unfinished training job on cluster {cluster}",
            hint="`train squad` without --resume starts one",
        )
    found = _find(jobs, job_id, unfinished[-3:])
    if not found.unfinished:
        raise UsageError(
            f"job {job_id} has nothing to resume: it is finished, or not a training job"
        )
    return found
