"""A job as data, and the places of its files."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

PLACEMENTS = ("auto", "reference")
FABRICS = ("tcp", "efa")


@dataclass(frozen=True)
class JobSpec:
    """A Python module to run in every rank: ``python -m module argv``."""

    id: str
    module: str
    argv: tuple[str, ...]
    nnodes: int
    nproc_per_node: int
    backend: str
    env: dict[str, str] = field(default_factory=dict)
    ccl_lookup: str = ""
    """Python code that prints where oneCCL's environment script is; for backend ccl."""

    @property
    def world_size(self) -> int:
        return self.nnodes * self.nproc_per_node


@dataclass(frozen=True)
class PlacementWish:
    """What the user may say of it; ``None``: as the nodes suggest. ``mode`` is one of PLACEMENTS."""

    mode: str = "auto"
    nproc_per_node: int | None = None
    ccl_workers: int | None = None
    fabric: str = "tcp"


def new_job_id(kind: str, now: datetime) -> str:
    """A job's id, such as ``squad-20260731-142501``."""
    return f"{kind}-{now:%Y%m%d-%H%M%S}"


@dataclass(frozen=True)
class JobPaths:
    """Where a job's files lie on the nodes, below the login user's home folder."""

    job_id: str
    home: str = "/home/ubuntu"

    @property
    def root(self) -> str:
        return f"{self.home}/{self.relative_root}"

    @property
    def relative_root(self) -> str:
        return f"spr-jobs/{self.job_id}"

    @property
    def upload(self) -> str:
        """The job's files on their way; its folder is made from them."""
        return f"{self.home}/{self.job_id}.tar"

    @property
    def code(self) -> str:
        return f"{self.root}/code"

    @property
    def data(self) -> str:
        return f"{self.root}/data"

    @property
    def model(self) -> str:
        return f"{self.root}/model"

    @property
    def work(self) -> str:
        """Where a program of the user's begins, beside its own files."""
        return f"{self.root}/work"

    @property
    def environment(self) -> str:
        """The variables of a user's program: a JSON list of ``NAME=VALUE``."""
        return f"{self.root}/environment.json"

    @property
    def output(self) -> str:
        return f"{self.root}/output"

    @property
    def started(self) -> str:
        return f"{self.root}/start.json"

    @property
    def script(self) -> str:
        return f"{self.root}/run.sh"

    @property
    def log(self) -> str:
        return f"{self.root}/log"

    @property
    def earlier_log(self) -> str:
        """What the job said before it was resumed."""
        return f"{self.root}/log.earlier"

    @property
    def pid(self) -> str:
        return f"{self.root}/pid"

    @property
    def exit_code(self) -> str:
        return f"{self.root}/exit"
