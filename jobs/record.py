"""What is kept of every job beside its results: ``job.json``."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
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
class JobRecord:
    """A job: ``command`` is what every rank runs, ``mpirun`` the whole line that starts them.

    Times are ISO 8601 in UTC; ``ended``, ``seconds`` and ``exit_code`` are ``None`` until the job has
    ended, and stay so where it was interrupted.
    """

    job: str
    kind: str
    cluster: str
    command: tuple[str, ...]
    mpirun: str
    nodes: tuple[Mapping[str, str], ...]
    placement: Mapping[str, Any]
    stack: Mapping[str, Any]
    began: str
    ended: str | None = None
    seconds: float | None = None
    exit_code: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    """What a kind of job has besides, such as the files that were sent."""


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
        began = datetime.fromisoformat(self.record.began)
        ended = (began + timedelta(seconds=seconds)).isoformat(timespec="seconds")
        done = replace(self.record, ended=ended, seconds=seconds, exit_code=exit_code)
        self._write(done)
        return done

    def _write(self, record: JobRecord) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(record), indent=1, ensure_ascii=False) + "\n"
        partial = self.folder / f".{FILE}.partial"
        partial.write_text(text, encoding="utf-8", errors="surrogateescape")
        partial.replace(self.folder / FILE)


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


def make_record(
    job: str,
    cluster: Cluster,
    stack: Stack,
    command: tuple[str, ...],
    launched: LaunchCommand,
    placement: Mapping[str, Any],
    now: datetime,
    **more: Any,
) -> JobRecord:
    """The record of a job that is about to start; its kind is the first word of its id."""
    return JobRecord(
        job=job,
        kind=job.partition("-")[0],
        cluster=cluster.name,
        command=command,
        mpirun=str(launched),
        nodes=tuple(node.as_dict() for node in cluster.nodes),
        placement=placement,
        stack={"name": stack.name, "packages": list(stack.python_packages)},
        began=now.isoformat(timespec="seconds"),
        more=more,
    )
