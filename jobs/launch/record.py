"""The record of a job, kept with its results: ``job.json``."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from infra.errors import UsageError
from infra.files import read_object
from jobs.launch.placement import Placement

FILE = "job.json"


@dataclass(frozen=True)
class CloudInfo:
    """The cloud of a job's nodes; ``billed`` says whether they cost money.

    ``usd_per_hour`` is the price of one node's machine on demand, if that of the region is known.
    """

    cloud: str = ""
    region: str = ""
    billed: bool | None = None
    usd_per_hour: float | None = None
    price_source: str = ""


@dataclass(frozen=True)
class JobRecord:
    """A job: ``argv`` is what every rank runs, ``mpirun`` the command that starts them.

    Times are ISO 8601 in UTC. ``ended``, ``seconds``, and ``exit_code`` are ``None`` until the job
    ends, and if it was interrupted. ``more`` holds what this kind of job adds.
    """

    job: str
    kind: str
    cluster: str
    cloud: str
    region: str
    billed: bool | None
    usd_per_hour: float | None
    price_source: str
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


def read_job_id(folder: Path) -> str:
    """Return the ID of the job whose results are in a folder; "" if there is no record."""
    try:
        return str(read_object(folder / FILE)["job"])
    except (UsageError, KeyError):
        return ""


def write_job_id(folder: Path, job: str) -> None:
    """Write whose results are in a folder, unless the job's record is there."""
    if not (folder / FILE).exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_text(json.dumps({"job": job}) + "\n", encoding="utf-8")


def describe_placement(placement: Placement, backend: str) -> dict[str, Any]:
    """Return ranks, threads, and cores as the record holds them."""
    ranks = placement.ranks
    return {
        "nproc_per_node": ranks.nproc_per_node,
        "omp_threads": ranks.omp_threads,
        "ccl_workers": ranks.ccl_workers,
        "pinned": bool(ranks.shares),
        "shares": [[asdict(share) for share in node] for node in ranks.shares],
        "backend": backend,
        "interface": placement.interface,
    }


@dataclass(frozen=True)
class Recorder:
    """Writes a job's record into its results folder, if it has one, at its start and its end."""

    folder: Path | None
    record: JobRecord
    _start: float = field(default_factory=time.monotonic)

    def begin(self) -> None:
        """Write the record now, so that it exists even if this machine dies."""
        self._write(self.record)

    def end(self, exit_code: int) -> JobRecord:
        """Add how the job ended, by this machine's clock."""
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
        # ASCII: a command that is not valid Unicode stays readable as escapes.
        text = json.dumps(asdict(record), indent=1) + "\n"
        partial = self.folder / f".{FILE}.partial"
        partial.write_text(text, encoding="utf-8")
        partial.replace(self.folder / FILE)
