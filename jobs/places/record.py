"""A job's record, ``job.json``, in its folder on the nodes and with its results."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import PositiveInt

from infra.aws.cloud import cloud_flag
from infra.errors import JobError, UsageError
from infra.files import parse_as, read_object, read_text
from jobs.places.launcher import JobEnd, parse_end
from jobs.places.placement import Placement
from jobs.places.plan import RECORD, JobPaths, own_folder
from jobs.worker.runtime.events import NAMES
from jobs.worker.runtime.output import RESULTS, new_file
from jobs.worker.spec import PlacementOptions
from jobs.worker.training.options import BASE_MODEL
from provision.host import Host


@dataclass(frozen=True)
class CloudInfo:
    """The cloud of a job's nodes; ``billed`` says whether they cost money.

    ``usd_per_hour`` is one node's price, with its disk and address, if it is known for the region; ``market``
    says for which market.
    """

    cloud: str = ""
    region: str = ""
    billed: bool | None = None
    usd_per_hour: float | None = None
    price_source: str = ""
    market: str = "on demand"
    owner: str = ""
    """Who submits the job."""
    tags: tuple[tuple[str, str], ...] = ()
    """The user's own, of the cluster."""

    @property
    def flag(self) -> str:
        """The option for a command about one of its buckets: " --cloud local", or ""."""
        return cloud_flag(self.cloud)


@dataclass(frozen=True, kw_only=True)
class JobRecord(CloudInfo):
    """A job: ``argv`` is what every rank runs, ``mpirun`` the command that starts them.

    Times are ISO 8601 in UTC; ``when`` is the submission. Until the job ends, ``ended``, ``seconds``, and
    ``exit_code`` are ``None``, and ``state`` is empty. ``nodes`` and ``placement`` are those it may use and,
    once it has ended, those it used; it starts on ``nnodes`` of them. ``options`` are the user's choices,
    ``env`` is what this kind of job sets for its ranks. ``resumable``: it can continue from a checkpoint;
    ``gather_output``: the workers' output is fetched. ``bucket`` is the S3 URL below which its folder is
    stored, as JOB; "" for none. ``cores`` and ``memory_gib`` are those of :class:`Resources`; ``node_share``
    is the share of each node's price that a job with ``cores`` pays.
    ``seconds`` is how long the last attempt ran, ``earlier_s`` what passed before it since the first one
    began, ``earlier_node_s`` the same in seconds of one node, and ``resumed_s`` what the runs that it resumes
    took, with what was before them. ``run_nodes`` is the number of nodes on which a resumed job starts, and
    of which these are seconds; 0 for ``nnodes``.
    What the cluster cost before, in seconds of each of the job's nodes: ``boot_s`` is the time since their
    launch, for the first job there, and ``idle_s``, for a later job, since the end of the jobs before; 0 if
    one was running or waiting. ``former_s`` is that of machines which the cluster no longer has.
    ``more`` holds further fields of this kind of job. Of one with limits, ``limit`` has them, a node's price,
    and when it begins to keep all nodes; ``spent`` is what the runs that a job resumes took of its limits,
    and ``recovery`` what it keeps of its restarts.
    """

    job: str
    kind: str
    cluster: str
    command: str
    argv: tuple[str, ...]
    mpirun: str
    nodes: tuple[Mapping[str, str], ...]
    nnodes: PositiveInt
    placement: Placement
    options: PlacementOptions
    env: Mapping[str, str]
    resumable: bool
    gather_output: bool
    stack: str
    packages: tuple[str, ...]
    when: str
    ended: str | None = None
    seconds: float | None = None
    earlier_s: float = 0.0
    earlier_node_s: float = 0.0
    exit_code: int | None = None
    state: str = ""
    bucket: str = ""
    boot_s: float = 0.0
    idle_s: float = 0.0
    former_s: float = 0.0
    resumed_s: float = 0.0
    run_nodes: int = 0
    cores: int | None = None
    memory_gib: int | None = None
    node_share: float = 1.0
    more: Mapping[str, Any] = field(default_factory=dict)

    def ended_as(self, end: JobEnd) -> JobRecord:
        """Return the record with the job's outcome, by the head's clock."""
        places = [n for n, node in enumerate(self.nodes) if node["name"] in end.nodes]
        shares = self.placement.shares
        used = tuple(shares[n] for n in places) if shares and places else shares
        return replace(
            self,
            nodes=tuple(self.nodes[n] for n in places) or self.nodes,
            placement=replace(self.placement, shares=used),
            ended=end.ended.isoformat(timespec="seconds") if end.ended else None,
            seconds=end.seconds,
            earlier_s=end.earlier_s,
            earlier_node_s=round(replace(end, ended=end.began).node_s(), 3),
            exit_code=end.exit_code,
            state=end.state,
        )

    def resumed_as(self, now: JobRecord, end: JobEnd) -> JobRecord:
        """Return the record of a job that ended, for its next run, with what it took until now.

        More nodes than this run has, or a higher price or share of it, count as more time.
        """
        before = self.resumed_s + self.boot_s + self.idle_s + self.former_s
        begun = end.first or end.began
        if begun and (self.boot_s or self.idle_s):  # the nodes had nothing else to do before
            before += max(0.0, (begun - datetime.fromisoformat(self.when)).total_seconds())
        node_s = end.node_s() + before * (self.run_nodes or self.nnodes)
        if self.usd_per_hour and now.usd_per_hour:
            node_s *= self.usd_per_hour / now.usd_per_hour
        node_s *= self.node_share / now.node_share
        where = ("cluster", "cloud", "region", "billed", "usd_per_hour", "price_source", "market")
        changed = (*where, "bucket", "when", "boot_s", "idle_s", "former_s", "node_share")
        known = {name: getattr(now, name) for name in changed}
        more = {name: now.more[name] for name in ("limit", "spent", "recovery") if name in now.more}
        known.update(resumed_s=node_s / now.nnodes, run_nodes=now.nnodes)
        return replace(self, **known, more={**self.more, **more})

    def render(self) -> str:
        """Return the content of ``job.json``."""
        # ASCII: a command that is not valid Unicode stays readable as escapes.
        return json.dumps(asdict(self), indent=1) + "\n"


def read_record(head: Host, paths: JobPaths) -> JobRecord:
    """Read a job's record on the head. Raises :class:`JobError` if it is damaged."""
    try:
        return parse_as(JobRecord, head.run(f"cat {paths.record}").stdout, paths.record)
    except UsageError as error:
        raise JobError(f"the job's record on node0 can't be read: {error.message}") from error


def write_record(folder: Path, text: str) -> None:
    """Write the content of ``job.json`` into a results folder atomically."""
    with new_file(own_folder(folder) / RECORD, f".{os.getpid()}") as partial:
        partial.write_text(text, encoding="utf-8")


def results_option(job: str, results: Path | None) -> str:
    """Return the option for a results folder other than a job's default one: " --results here", or ""."""
    is_default = results in (None, Path("results", job))
    return "" if is_default else f" --results {shlex.quote(str(results))}"


def read_job_id(folder: Path) -> str:
    """Return the ID of the job whose results are in a folder; "" if there is no record."""
    try:
        return str(read_object(own_folder(folder) / RECORD)["job"])
    except (UsageError, KeyError):
        return ""


def has_own_results(record: Mapping[str, Any]) -> bool:
    """Return whether a job's ``results.json`` is ours: a program's, but for an array's, is the user's."""
    more = record.get("more")
    return record.get("kind") != "run" or (isinstance(more, Mapping) and "elements" in more)


def read_results(folder: Path, record: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return our ``results.json`` in a folder; ``{}`` without one. Raises :class:`UsageError`.

    ``record`` is the job's, if it has been read.
    """
    if record is None:
        record = read_object(own_folder(folder) / RECORD, optional=True)
    return read_object(folder / RESULTS, optional=True) if has_own_results(record) else {}


def training_options(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of training, which the job's command has as JSON, with the user's names of files.

    Returns ``{}`` for other jobs, and for records of unknown origin.
    """
    argv, env = record.get("argv"), record.get("env")
    # A study's plan comes first.
    found = [*filter(None, map(_parse_options, argv if isinstance(argv, list) else ()))]
    options, own = found[-1] if found else {}, env if isinstance(env, dict) else {}
    names = _parse_options(own.get(NAMES))
    if BASE_MODEL in own:
        names[str(options.get("model"))] = own[BASE_MODEL]
    return {
        name: names.get(value, value) if isinstance(value, str) else value
        for name, value in options.items()
    }


def _parse_options(text: Any) -> dict[str, Any]:
    """Return a JSON object; an empty one for anything else."""
    try:
        found = json.loads(text) if isinstance(text, str) and text.startswith("{") else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def complete_record(folder: Path, text: str) -> None:
    """Add the content of ``end.json``, if there is one, to a record that was fetched."""
    end = parse_end(text)
    with suppress(UsageError):  # a damaged record stays unchanged
        path = own_folder(folder) / RECORD
        record = parse_as(JobRecord, read_text(path), str(path))
        if end and not record.state:
            write_record(folder, record.ended_as(end).render())


def require_own_results(folder: Path, job: str) -> None:
    """Raise :class:`UsageError` for a folder with another job's results, or with other files.

    A model must never be saved beside another job's scores. A folder with the job's name is the job's, for
    example after an interrupted download. Hidden files don't count: interrupted downloads also leave some.
    """
    owner = read_job_id(folder)
    if owner not in ("", job):
        raise _taken(folder, owner)
    if owner or (job and folder.name == job) or not folder.is_dir():
        return
    if found := sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")):
        raise UsageError(
            f"--results {folder}: it contains other files, such as {found[0]}",
            hint="name a new or empty folder",
        )


def claim_results(folder: Path, job: str, text: str = "") -> bool:
    """Reserve a folder for a job's results; return whether it had no record yet.

    The record, whose content is ``text``, is the claim, until :func:`release_results` or the user removes
    it. Raises :class:`UsageError` if another job has the folder, or it can't be written.
    """
    is_new, own = False, own_folder(folder)
    try:
        own.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError), (own / RECORD).open("x", encoding="utf-8") as file:
            is_new = True
            file.write(json.dumps({"job": job}) + "\n")
        if not is_new and (owner := read_job_id(folder)) != job:
            raise _taken(folder, owner or "unknown")
        if text:
            write_record(folder, text)
    except OSError as error:
        if is_new:
            release_results(folder)
        why = error.strerror or error
        raise UsageError(f"--results {folder}: can't be written: {why}") from None
    return is_new


def _taken(folder: Path, owner: str) -> UsageError:
    return UsageError(
        f"--results {folder}: it contains the results of job {owner}",
        hint="give another folder, or remove this one",
    )


def release_results(folder: Path) -> None:
    """Remove the record of a job that was not submitted, and its folder if nothing else is in it."""
    with suppress(OSError):
        (own_folder(folder) / RECORD).unlink()
        own_folder(folder).rmdir()
        folder.rmdir()
