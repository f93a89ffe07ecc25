"""The record of every job, kept with its results: ``job.json``."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from cluster.nodes import Cluster
from jobs.launch.mpirun import LaunchCommand
from jobs.launch.placement import Placement
from provision.stacks import Stack

FILE = "job.json"


@dataclass(frozen=True)
class CloudInfo:
    """The cloud of a job's nodes; ``billed`` says whether they cost money."""

    cloud: str = ""
    region: str = ""
    billed: bool | None = None


@dataclass(frozen=True)
class JobRecord:
    """A job: ``argv`` is what every rank runs, ``mpirun`` the whole line that starts them.

    Times are ISO 8601 in UTC. ``ended``, ``seconds``, and ``exit_code`` are ``None`` until the job
    ends, and stay so if it was interrupted. ``more`` holds what this kind of job adds.
    """

    job: str
    kind: str
    cluster: str
    cloud: str
    region: str
    billed: bool | None
    command: str
    argv: tuple[str, ...]
    mpirun: str
    nodes: tuple[Mapping[str, str], ...]
    placement: Mapping[str, Any]
    stack: str
    packages: tuple[str, ...]
    when: str
    ended: str | None = None
    seconds: float | None = None
    exit_code: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


def make_record(
    job: str,
    cluster: Cluster,
    stack: Stack,
    cloud: CloudInfo,
    argv: Sequence[str],
    launched: LaunchCommand,
    now: datetime,
) -> JobRecord:
    """Return the record of a job that is about to start; its kind is the first word of its ID."""
    return JobRecord(
        job=job,
        kind=job.partition("-")[0],
        cluster=cluster.name,
        **asdict(cloud),
        command=shlex.join(argv),
        argv=tuple(argv),
        mpirun=str(launched),
        nodes=tuple(node.as_dict() for node in cluster.nodes),
        placement={},
        stack=stack.name,
        packages=stack.python_packages,
        when=now.isoformat(timespec="seconds"),
    )


def read_job_id(folder: Path) -> str:
    """The job whose results are in a folder; "" where none are, or they do not say."""
    try:
        return str(json.loads((folder / FILE).read_text(encoding="utf-8"))["job"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def write_job_id(folder: Path, job: str) -> None:
    """Say whose results are in a folder, where no record of the job has said it."""
    if not (folder / FILE).exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_text(json.dumps({"job": job}) + "\n", encoding="utf-8")


def describe_placement(placement: Placement, backend: str) -> dict[str, Any]:
    """Ranks, threads and cores, as the record holds them."""
    ranks = placement.ranks
    return {
        "nproc_per_node": ranks.nproc_per_node,
        "omp_threads": ranks.omp_threads,
        "ccl_workers": ranks.ccl_workers,
        "pinned": bool(ranks.shares),
        "shares": [[asdict(share) for share in node] for node in ranks.shares],
        "backend": backend,
        "fabric": placement.fabric,
        "interface": placement.interface,
    }


@dataclass(frozen=True)
class Recorder:
    """Writes a job's record into the folder of its results, at its start and its end.

    Without a folder it writes nothing.
    """

    folder: Path | None
    record: JobRecord
    _start: float = field(default_factory=time.monotonic)

    def begin(self) -> None:
        """Write what is known now: even a job whose laptop dies has a record."""
        self._write(self.record)

    def end(self, exit_code: int) -> JobRecord:
        """Write how the job ended; the times are this machine's."""
        seconds = round(time.monotonic() - self._start, 3)
        began = datetime.fromisoformat(self.record.when)
        ended = (began + timedelta(seconds=seconds)).isoformat(timespec="seconds")
        done = replace(self.record, ended=ended, seconds=seconds, exit_code=exit_code)
        self._write(done)
        return done

    def _write(self, record: JobRecord) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        # ASCII, so that a command that is not valid text stays readable as an escape.
        text = json.dumps(asdict(record), indent=1) + "\n"
        partial = self.folder / f".{FILE}.partial"
        partial.write_text(text, encoding="utf-8")
        partial.replace(self.folder / FILE)
