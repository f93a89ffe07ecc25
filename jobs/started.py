"""What a job was started with, kept in its folder on the nodes, so that it can be continued."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from infra.errors import UsageError
from jobs.spec import PlacementWish
from provision.host import Host

# Names sort by time. A checkpoint is one when its folder has its final name.
_LIST = """# what squad jobs are there
cd ~/spr-jobs 2>/dev/null || exit 0
for start in squad-*/start.json; do
  [ -f "$start" ] || continue
  job=${start%/start.json}
  state=unfinished; [ -f "$job/output/results.json" ] && state=finished
  step=$(ls "$job/output/checkpoints" 2>/dev/null | grep -x 'step-[0-9]*' | sort -V | tail -n 1)
  echo "$job $state ${step:--}"
done
"""


@dataclass(frozen=True)
class Started:
    """A job as its ranks were started; ``argv`` has the nodes' paths."""

    argv: tuple[str, ...]
    nnodes: int
    nproc_per_node: int
    placement: PlacementWish
    offline: bool
    """It needs nothing from the hub."""

    @property
    def world_size(self) -> int:
        return self.nnodes * self.nproc_per_node

    def render(self) -> bytes:
        """As ``start.json`` holds it."""
        return (json.dumps(asdict(self), indent=1) + "\n").encode()


def parse_started(text: str) -> Started:
    """What :meth:`Started.render` wrote. Raises ``ValueError`` or ``TypeError`` for anything else."""
    content = json.loads(text)
    wish = PlacementWish(**content.pop("placement"))
    return Started(**{**content, "argv": tuple(content["argv"]), "placement": wish})


@dataclass(frozen=True)
class JobState:
    """A job in the head's folder; ``checkpoint`` is the newest one's name, "" for none."""

    job_id: str
    finished: bool
    checkpoint: str


def list_jobs(head: Host) -> list[JobState]:
    """The training jobs that the head knows, oldest first."""
    rows = (line.split() for line in head.run(_LIST).stdout.splitlines())
    return [
        JobState(job, state == "finished", "" if step == "-" else step) for job, state, step in rows
    ]


def choose_job(jobs: list[JobState], wish: str | None, cluster: str) -> JobState:
    """The job of that id, or the last one that has not finished.

    Raises :class:`UsageError` where there is none, or it has nothing left to do.
    """
    unfinished = [job for job in jobs if not job.finished]
    if wish is None and unfinished:
        return unfinished[-1]
    if wish is None:
        raise UsageError(
            f"no unfinished training job on cluster {cluster}",
            hint="`spr-cluster train squad` starts one",
        )
    for job in jobs:
        if job.job_id == wish and not job.finished:
            return job
        if job.job_id == wish:
            raise UsageError(f"job {wish} is finished: there is nothing left to resume")
    known = ", ".join(job.job_id for job in unfinished[-3:]) or "no other unfinished one"
    raise UsageError(f"no job {wish!r} on cluster {cluster}", hint=f"there is {known}")
