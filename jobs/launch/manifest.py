"""What a job was started with, kept in its folder on the nodes, so that it can be resumed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from pydantic import PositiveInt

from infra.errors import JobError, UsageError
from infra.files import parse_as
from jobs.launch.plan import JobPaths, PlacementOptions
from provision.host import Host


@dataclass(frozen=True)
class JobManifest:
    """A job as its ranks were started: arguments, environment, and number of ranks."""

    argv: tuple[str, ...]
    nnodes: PositiveInt
    nproc_per_node: PositiveInt
    placement: PlacementOptions
    env: Mapping[str, str]

    @property
    def world_size(self) -> int:
        return self.nnodes * self.nproc_per_node

    def render(self) -> bytes:
        """Return the content of ``start.json``."""
        return (json.dumps(asdict(self), indent=1) + "\n").encode()


def read_manifest(head: Host, paths: JobPaths) -> JobManifest:
    """Read a job's manifest from the head. Raises :class:`JobError` if it is damaged."""
    try:
        return parse_as(JobManifest, head.run(f"cat {paths.manifest}").stdout, paths.manifest)
    except UsageError as error:
        raise JobError(f"the job's record on node0 can't be read: {error.message}") from error
