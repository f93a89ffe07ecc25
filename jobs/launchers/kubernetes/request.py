"""What a job on Kubernetes asks of the cluster, besides its plan. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from jobs.launchers.kubernetes.kinds import TRAIN_JOB, JobKind
from jobs.launchers.node_shape import NodeShape

CLAIM_PATH = "/workspace"
"""Where every pod mounts the claim."""


@dataclass(frozen=True)
class Claim:
    """The volume of data, models, and results: one that exists, or, with a ``size``, a new one."""

    name: str = "spr-cluster"
    size: str | None = None
    storage_class: str | None = None


@dataclass(frozen=True)
class PodOptions:
    """What a job asks of the cluster, besides its training. ``nodes`` is the number of pods."""

    name: str
    nodes: int
    image: str
    kind: JobKind = TRAIN_JOB
    namespace: str | None = None
    claim: Claim = field(default_factory=Claim)
    shape: NodeShape = field(default_factory=NodeShape)
    pull_secret: str | None = None
    hub_secret: str | None = None
    """Holds a token of the hub, under the key ``HF_TOKEN``."""
    any_cpu: bool = False
    """Also run on nodes without AMX."""

    @property
    def folder(self) -> str:
        """The job's folder on the claim."""
        return f"{CLAIM_PATH}/jobs/{self.name}"

    @property
    def output(self) -> str:
        """The ranks' output: logs, metrics, checkpoints, model, results."""
        return f"{self.folder}/output"
