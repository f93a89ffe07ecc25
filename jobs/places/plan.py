"""A job as data, and the paths of its files. Pure."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path
from threading import get_ident
from typing import Any

from infra.words import counted, format_size
from jobs.worker.spec import JobSpec
from jobs.worker.supervisor.deadline import SAVE_S
from jobs.worker.supervisor.launch import END

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
STOP_SECONDS = 10
"""Default time between a request to stop and a kill."""
RECORD, SCRIPT = "job.json", "run.sh"
FETCHED = "fetched"
"""In a job's folder, read by :mod:`cluster.slurm.job_queue`: all output older than it was fetched."""
PACKAGES = "packages"
"""In a job's folder: a link to the packages that were installed for it."""
SITE = "site"
"""In a job's folder: the metadata and console scripts of the project itself."""
CHECKPOINT_SECONDS = int(SAVE_S)
"""Least time to save a checkpoint after a request to stop."""


@dataclass(frozen=True)
class JobFolder:
    """A local folder for a job, which gets it as ``target``. ``size`` is in bytes.

    ``store`` is its place on the nodes, below the home folder. A folder with ``names``, the files to send,
    has its content's digest in its store, and each job gets a copy. Without, all jobs share one.
    """

    root: Path
    store: str
    target: str
    size: int
    names: tuple[str, ...] | None = None
    stamped: tuple[tuple[int, ...], ...] = ()
    """:meth:`stamp` when the digest was made."""
    lost: tuple[tuple[str, str], ...] = ()
    """Links of a shared folder that the nodes can't follow, and their ends."""

    @property
    def shared(self) -> bool:
        return self.names is None

    @property
    def targets(self) -> tuple[str, ...]:
        """The places in the job of a shared folder, or of files."""
        names = self.names
        return (self.target,) if names is None else tuple(f"{self.target}/{each}" for each in names)

    def has_changed(self) -> bool:
        """Whether the files differ from those of which the digest was made. Those of a shared one may."""
        try:
            return not self.shared and self.stamp() != self.stamped
        except FileNotFoundError:
            return True

    def stamp(self) -> tuple[tuple[int, ...], ...]:
        """Return the files' sizes, times of change, and modes, which differ if one of them has changed."""
        known = [(self.root / name).lstat() for name in self.names or ()]
        return tuple((each.st_size, each.st_mtime_ns, each.st_mode) for each in known)

    def __str__(self) -> str:
        files = "" if self.names is None else f"{counted(len(self.names), 'file')}, "
        return f"{self.root.name}: {files}{format_size(self.size)}"


@dataclass(frozen=True)
class PackageList:
    """Python packages that a job needs, as pip's requirement lines; ``source`` is the name of their file."""

    source: str
    lines: tuple[str, ...]
    is_lock: bool = False
    """Whether it is complete, with exact versions."""
    own_torch: bool = False
    """Whether it may replace the stack's torch."""
    hint: str = "--packages names another file, `--packages none` installs nothing"
    """What to do if it can't be resolved."""
    wants: tuple[str, ...] = ()
    """What the project asks for, from which a lock chose."""
    python: str = ""
    """The Python versions that it needs, such as ``>=3.10``."""
    constraints: tuple[str, ...] = ()
    index: str = ""
    indexes: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    """The package index instead of the node's; others, and pages of links, to search as well."""
    imports: tuple[str, ...] = ()
    """Folders of the project that have packages which are not installed."""

    def __str__(self) -> str:
        return f"the packages of {self.source}"


@dataclass(frozen=True)
class JobPlan:
    """A Python module to run in every rank: ``python -m module argv``.

    Ranks start in the job's folder, so paths in ``argv`` are relative to it. ``files`` are named the
    same way; the code of ``jobs/worker`` is always sent with them. ``backend`` is ``ccl`` or ``gloo``.
    """

    kind: str
    """First word of the job's ID."""
    module: str
    argv: tuple[str, ...]
    backend: str
    spec: JobSpec = field(default_factory=JobSpec)
    """What the user asked for."""
    title: str = "Run"
    """What the job does, for the progress display: ``Train`` becomes ``Train on 4 nodes``."""
    files: Mapping[str, Path | bytes] = field(default_factory=dict)
    folders: tuple[JobFolder, ...] = ()
    """Folders to send before ``files``."""
    reads: tuple[tuple[str, str], ...] = ()
    """Data in S3 that the ranks read while they work, which the head looks up first, as in ``stage``."""
    writes: tuple[str, ...] = ()
    """Places in S3 that the ranks write, where the head tries it first."""
    head_folders: Mapping[str, str] = field(default_factory=dict)
    """Folders on the head that every node gets after ``files``, by their names in the job's folder."""
    packages: PackageList | None = None
    """What to install beside the stack's packages."""
    sends: str = ""
    """The user's files, such as ``2 files, 3.4 MiB``, for the progress display."""
    env: Mapping[str, str] = field(default_factory=dict)
    variables: tuple[str, ...] = ()
    """The user's ``NAME=VALUE`` words: sent in a private file, and removed when the job ends."""
    results: Path | None = None
    """Local folder for output, log, and record; ``None`` leaves them on the head."""
    command: tuple[str, ...] = ()
    """The command to record, if it is not ``python -m module argv``."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields of this kind of job in its record."""
    is_interactive: bool = False
    """Runs on the user's terminal and may print nothing for long."""
    gather_output: bool = False
    """Fetch the workers' output folders too, each into a folder named after its node."""
    resume_command: tuple[str, ...] = ()
    """The command that resumes this kind of job, up to the job's ID; empty if it can't be resumed."""
    resumes: bool = False
    """Whether later attempts get the argument ``--resume`` and resume the job instead of starting over."""
    planned_nodes: int = 0
    """How many nodes the job began with, if it continues on fewer: they share its samples per step."""


@cache
def _draw_suffix(_now: datetime | None, process: int, _thread: int) -> str:
    """Return three characters: a process draws none twice, and its first ones are random."""
    number = next(_numbers(process))
    return "".join(_DIGITS[number // place % 36] for place in (1296, 36, 1))


@cache
def _numbers(_process: int) -> Iterator[int]:
    return itertools.count(secrets.randbelow(36**3))


def new_job_id(kind: str, now: datetime) -> str:
    """Return the ID of the job of a command that began ``now``, such as ``squad-20260731-142501-k3f``.

    Its suffix tells apart the jobs of one second. The same ``now``, to the microsecond, has the same ID in
    the same thread only.
    """
    return f"{kind}-{now:%Y%m%d-%H%M%S}-{_draw_suffix(now, os.getpid(), get_ident())}"


@dataclass(frozen=True)
class JobPaths:
    """Paths of a job's files on the nodes, below the login user's home folder."""

    job_id: str
    home: str = "/home/ubuntu"

    @property
    def relative_root(self) -> str:
        return f"spr-jobs/{self.job_id}"

    @property
    def root(self) -> str:
        return f"{self.home}/{self.relative_root}"

    @property
    def upload(self) -> str:
        """The archive of the job's files."""
        return f"{self.home}/{self.job_id}.tar"

    @property
    def code(self) -> str:
        return f"{self.root}/code"

    @property
    def record(self) -> str:
        """The job's record at submission."""
        return f"{self.root}/{RECORD}"

    def uploaded(self, name: str) -> str:
        """The path of a file as uploaded; it gets its name when the queue takes the job."""
        return f"{self.root}/{name}.{self.new}"

    @property
    def new(self) -> str:
        """The suffix of this process's uploads."""
        return _draw_suffix(None, os.getpid(), get_ident())

    @property
    def log(self) -> str:
        return f"{self.root}/log"

    @property
    def end(self) -> str:
        """How the job ended."""
        return f"{self.root}/{END}"


def own_folder(results: Path) -> Path:
    """Return the folder of a job's own files in its results: log, record, and its ranks' logs and metrics."""
    return results / "job"
