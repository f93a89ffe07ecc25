"""What is kept of every job beside its results: ``job.json``."""

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
from jobs.mpirun import LaunchCommand
from jobs.placement import Placement
from provision.stacks import Stack

FILE = "job.json"


@dataclass(frozen=True)
class Where:
    """The cloud that a job's nodes are in; ``billed`` says whether they cost money."""

    cloud: str = ""
    region: str = ""
    billed: bool | None = None


@dataclass(frozen=True)
class JobRecord:
    """A job: ``argv`` is what every rank runs, ``mpirun`` the whole line that starts them.

    Times are ISO 8601 in UTC; ``ended``, ``seconds`` and ``exit_code`` are ``None`` until the job has
    ended, and stay so where it was interrupted. ``more`` is what a kind of job has besides.
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


@dataclass(frozen=True)
class Ground:
    """What a job stands on: its nodes and their software, and where they are."""

    cluster: Cluster
    stack: Stack
    where: Where = field(default_factory=Where)


def make_record(
    job: str, ground: Ground, argv: Sequence[str], launched: LaunchCommand, now: datetime
) -> JobRecord:
    """The record of a job that is about to start; its kind is the first word of its id."""
    return JobRecord(
        job=job,
        kind=job.partition("-")[0],
        cluster=ground.cluster.name,
        **asdict(ground.where),
        command=shlex.join(argv),
        argv=tuple(argv),
        mpirun=str(launched),
        nodes=tuple(node.as_dict() for node in ground.cluster.nodes),
        placement={},
        stack=ground.stack.name,
        packages=ground.stack.python_packages,
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
    """Writes a job's record into the folder of its results: when it begins, and when it has ended."""

    folder: Path
    record: JobRecord
    _start: float = field(default_factory=time.monotonic)

    def begin(self) -> None:
        """Write what is known now: a job whose laptop dies has a record, too."""
        self._write(self.record)

    def end(self, exit_code: int) -> JobRecord:
        """Write how it ended; the times are this machine's."""
        seconds = round(time.monotonic() - self._start, 3)
        began = datetime.fromisoformat(self.record.when)
        ended = (began + timedelta(seconds=seconds)).isoformat(timespec="seconds")
        done = replace(self.record, ended=ended, seconds=seconds, exit_code=exit_code)
        self._write(done)
        return done

    def _write(self, record: JobRecord) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        # A word of the command that is no text stays readable as an escape.
        text = json.dumps(asdict(record), indent=1) + "\n"
        partial = self.folder / f".{FILE}.partial"
        partial.write_text(text, encoding="utf-8")
        partial.replace(self.folder / FILE)
