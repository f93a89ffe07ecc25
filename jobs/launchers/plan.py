"""A job as data, and the paths of its files. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from jobs.worker.supervisor.launch import BEGIN, END

PLACEMENTS = ("auto", "reference")
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_SUFFIX = "".join(secrets.choice(_DIGITS) for _ in range(3))
STOP_SECONDS = 10
"""Default time between a request to stop and a kill."""
CHECKPOINT_SECONDS = 120
"""Time to save a checkpoint after a request to stop: a large model's has gigabytes."""


@dataclass(frozen=True)
class PlacementOptions:
    """What the user may choose about placement; ``None`` lets the nodes decide.

    ``mode`` is one of :data:`PLACEMENTS`.
    """

    mode: str = "auto"
    nproc_per_node: int | None = None
    ccl_workers: int | None = None


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
    title: str = "Run"
    """What the job does, for the progress display: ``Train`` becomes ``Train on 4 nodes``."""
    files: Mapping[str, Path | bytes] = field(default_factory=dict)
    sends: str = ""
    """The user's files, such as ``2 files, 3.4 MiB``, for the progress display."""
    placement: PlacementOptions = field(default_factory=PlacementOptions)
    nodes: int | None = None
    """How many nodes of the cluster to use; ``None`` uses all of them."""
    env: Mapping[str, str] = field(default_factory=dict)
    results: Path | None = None
    """Local folder for output, log, and record; ``None`` leaves them on the head."""
    command: tuple[str, ...] = ()
    """The command to record, if it is not ``python -m module argv``."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What this kind of job adds to its record."""
    gather_output: bool = False
    """Fetch the workers' output folders too, each into a folder named after its node."""
    resume_command: tuple[str, ...] = ()
    """The command that resumes this kind of job, up to the job's ID; empty if it can't be resumed."""
    resumed_job: str = ""
    """The ID of the job to resume; its files are already on the head."""
    retries: int = 0
    """How often the job may run again after it has lost a rank or a node."""
    elastic: int | None = None
    """With how many nodes at least the job goes on after a loss; ``None`` for as many as before."""
    retry_argv: tuple[str, ...] = ()
    """The arguments of later attempts, if they differ: they resume the job instead of starting over."""


def new_job_id(kind: str, now: datetime) -> str:
    """Return a job ID such as ``squad-20260731-142501-k3f``.

    Its end differs from process to process: two may start a job in the same second.
    """
    return f"{kind}-{now:%Y%m%d-%H%M%S}-{_SUFFIX}"


@dataclass(frozen=True)
class JobPaths:
    """Where a job's files are on the nodes, below the login user's home folder."""

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
        """The archive in which the job's files arrive."""
        return f"{self.home}/{self.job_id}.tar"

    @property
    def code(self) -> str:
        return f"{self.root}/code"

    @property
    def output(self) -> str:
        return f"{self.root}/output"

    @property
    def record(self) -> str:
        """What the job was submitted with."""
        return f"{self.root}/{RECORD}"

    @property
    def new_script(self) -> str:
        """The batch script as this process writes it, before it becomes ``run.sh``."""
        return f"{self.root}/run.sh.{_SUFFIX}"

    @property
    def log(self) -> str:
        return f"{self.root}/log"

    @property
    def begin(self) -> str:
        """When and on which nodes the last attempt began."""
        return f"{self.root}/{BEGIN}"

    @property
    def end(self) -> str:
        """How the job ended."""
        return f"{self.root}/{END}"

    @property
    def fetched(self) -> str:
        """Marks that the output up to its time was fetched, for :mod:`cluster.slurm.job_queue`."""
        return f"{self.root}/fetched"


RECORD = "job.json"
