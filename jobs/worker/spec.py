"""A job as one value: every front end makes it, the plan adds what the cluster decides, and nodes read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PLACEMENTS = ("tuned", "auto", "reference")


@dataclass(frozen=True)
class Work:
    """What a job computes: a task with its options, or a program with its arguments.

    ``options`` are all of the task's options, by name. Paths are those of the machine that submits the job,
    or on the nodes for a resumed one.
    """

    task: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    program: tuple[str, ...] = ()
    study: Mapping[str, Any] = field(default_factory=dict)
    """The fields of a :class:`.study.plan.StudyPlan`, if the task is trained in several trials."""


@dataclass(frozen=True)
class PlacementOptions:
    """The user's choices about placement; ``None`` derives a value from the nodes.

    ``mode`` is ``auto`` or ``reference``.
    """

    mode: str = "auto"
    nproc_per_node: int | None = None
    ccl_workers: int | None = None


@dataclass(frozen=True)
class Resources:
    """The nodes and cores of a job."""

    nodes: int | None = None
    """How many nodes of the cluster to use; ``None`` uses all of them."""
    placement: PlacementOptions = field(default_factory=PlacementOptions)
    cores: int | None = None
    """Physical cores on each node, which other jobs may share; ``None`` for whole nodes."""
    memory_gib: int | None = None
    """Memory on each node, for a job with ``cores``; ``None`` for the same share as of its cores."""

    def share_of(self, cores: int) -> float:
        """Return the share of a node with this many physical cores that the job pays for."""
        return min(1.0, self.cores / cores) if self.cores else 1.0


@dataclass(frozen=True)
class Storage:
    """A job's data in S3."""

    stage: tuple[tuple[str, str], ...] = ()
    """Data that every node reads itself: URLs, and their places in the job's folder; the plan adds them."""
    bucket: str | None = ""
    """The URL below which the job's folder is stored; ``None`` for the cluster's, "" for none."""


@dataclass(frozen=True)
class Recovery:
    """How a job continues after a loss."""

    retries: int = 0
    """How often it may restart after losing a rank or a node."""
    least_nodes: int = 0
    """Minimum number of nodes to continue with after a loss; 0 for as many as before."""
    resumed_job: str = ""
    """The ID of the job to resume; its files are already on the head."""


@dataclass(frozen=True)
class Ending:
    """What ends a job, and what follows its end."""

    down_when_done: bool = False
    """Powers the nodes off when it has ended and its folder is in the bucket."""
    max_time_s: float = 0.0
    """How long it may take from its first start, with its restarts; 0 for no limit.

    A job with a limit keeps the nodes after the cluster's deadline until it has ended.
    """
    budget: float = 0.0
    """The US dollars from which the limit was computed; 0 for none."""
    paid_node_s: float = 0.0
    """How many seconds of one node they pay."""
    by_budget: bool = False
    """Whether ``max_time_s`` follows from them: the user's own limit is longer, or there is none."""
    node_share: float = 1.0
    """What the job pays of each node's price: less than 1 with ``cores``."""
    on_finish: str = ""
    """A shell command to run on the head when it has ended."""


@dataclass(frozen=True)
class JobSpec:
    """A job, as the user asked for it."""

    work: Work = field(default_factory=Work)
    resources: Resources = field(default_factory=Resources)
    storage: Storage = field(default_factory=Storage)
    recovery: Recovery = field(default_factory=Recovery)
    ending: Ending = field(default_factory=Ending)


def parse_spec(content: Mapping[str, Any]) -> JobSpec:
    """Return the value of which ``dataclasses.asdict`` made the content, also by way of JSON."""
    work = {**content["work"], "program": tuple(content["work"]["program"])}
    stage = tuple((url, target) for url, target in content["storage"]["stage"])
    resources = content["resources"]
    return JobSpec(
        Work(**work),
        Resources(**{**resources, "placement": PlacementOptions(**resources["placement"])}),
        Storage(**{**content["storage"], "stage": stage}),
        Recovery(**content["recovery"]),
        Ending(**content["ending"]),
    )
