"""The record of a job, kept with its results: ``job.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from infra.errors import UsageError
from infra.files import parse_as, read_object, read_text
from jobs.launch.ending import JobEnd
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

    Times are ISO 8601 in UTC; ``when`` is that of the submission, ``seconds`` is how long the job ran.
    ``ended``, ``seconds``, and ``exit_code`` are ``None`` until the job ends, and ``state`` is empty.
    ``nodes`` are all that the job may use, and once it has ended, those that it used, like the
    ``placement``. ``more`` holds what this kind of job adds.
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
    state: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)

    def ended_as(self, end: JobEnd) -> JobRecord:
        """Return the record with how and where the job ended, by the head's clock."""
        return replace(
            self.on(end.nodes or [node["name"] for node in self.nodes]),
            ended=end.ended.isoformat(timespec="seconds") if end.ended else None,
            seconds=end.seconds,
            exit_code=end.exit_code,
            state=end.state,
        )

    def on(self, names: Sequence[str]) -> JobRecord:
        """Return the record of the job on some of the nodes that it may use."""
        at = [place for place, node in enumerate(self.nodes) if node["name"] in names]
        shares = self.placement["shares"]
        chosen = [shares[place] for place in at] if shares else shares
        placement = {**self.placement, "shares": chosen}
        return replace(self, nodes=tuple(self.nodes[place] for place in at), placement=placement)

    def render(self) -> str:
        """Return the content of ``job.json``."""
        # ASCII: a command that is not valid Unicode stays readable as escapes.
        return json.dumps(asdict(self), indent=1) + "\n"


def read_job_id(folder: Path) -> str:
    """Return the ID of the job whose results are in a folder; "" if there is no record."""
    try:
        return str(read_object(folder / FILE)["job"])
    except (UsageError, KeyError):
        return ""


def complete_record(folder: Path, text: str) -> None:
    """Add the content of ``end.json``, if there is one, to a record that was fetched."""
    try:
        record = parse_as(JobRecord, read_text(folder / FILE), str(folder / FILE))
        end = parse_as(JobEnd, text, "end.json") if text.strip() else None
    except UsageError:
        return  # of an earlier release
    if end and not record.state:
        Recorder(folder, record).end(end)


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

    def begin(self) -> None:
        """Write the record now, so that it exists even if this machine dies."""
        self._write(self.record)

    def end(self, end: JobEnd) -> JobRecord:
        """Add how and where the job ended."""
        done = self.record.ended_as(end)
        self._write(done)
        return done

    def _write(self, record: JobRecord) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.folder / f".{FILE}.partial"
        partial.write_text(record.render(), encoding="utf-8")
        partial.replace(self.folder / FILE)
