"""What a job was started with, kept in its folder on the nodes, so that it can be resumed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from infra.errors import JobError
from jobs.launch.plan import JobPaths, PlacementOptions
from provision.host import Host


@dataclass(frozen=True)
class JobManifest:
    """A job as its ranks were started: arguments, environment, and number of ranks."""

    argv: tuple[str, ...]
    nnodes: int
    nproc_per_node: int
    placement: PlacementOptions
    env: Mapping[str, str]

    @property
    def world_size(self) -> int:
        return self.nnodes * self.nproc_per_node

    def render(self) -> bytes:
        """Return the content of ``start.json``."""
        return (json.dumps(asdict(self), indent=1) + "\n").encode()


def parse_manifest(text: str) -> JobManifest:
    """Return what :meth:`JobManifest.render` wrote. Other text raises various errors."""
    content = json.loads(text)
    placement = PlacementOptions(**content.pop("placement"))
    return JobManifest(**{**content, "argv": tuple(content["argv"]), "placement": placement})


def read_manifest(head: Host, paths: JobPaths) -> JobManifest:
    """Read a job's manifest from the head. Raises :class:`JobError` if it is damaged."""
    try:
        return parse_manifest(head.run(f"cat {paths.manifest}").stdout)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise JobError(f"{paths.manifest} on node0 can't be read: {error}") from error
