"""What the lifecycle acts with: the cloud, its clients, this machine's files, time, progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone

from cluster.local_files import ClusterFiles
from cluster.nodes import HostOpener, Node
from infra import key_pair
from infra.clients import Clients
from infra.cloud import Cloud
from infra.errors import UsageError
from infra.instances import why_gone
from infra.progress import Progress, Silent
from infra.wait import Clock, SystemClock
from provision.host import Host
from provision.ssh import SshHost


def _utc_now() -> datetime:
    return datetime.now(timezone.utc)


@dataclass(frozen=True)
class Context:
    """What the lifecycle acts with; tests replace the parts that reach outside."""

    cloud: Cloud
    clients: Clients
    files: ClusterFiles
    progress: Progress = field(default_factory=Silent)
    clock: Clock = field(default_factory=SystemClock)
    now: Callable[[], datetime] = _utc_now
    make_host: Callable[[Node, ClusterFiles], Host] | None = None

    def host_opener(self) -> HostOpener:
        """Opens each node once and keeps its connection."""
        opened: dict[tuple[str, str], Host] = {}

        def open_host(node: Node) -> Host:
            # A node that got another rank is opened anew, under its new name.
            key = (node.instance.id, node.name)
            if key not in opened:
                opened[key] = (self.make_host or self._ssh_host)(node, self.files)
            return opened[key]

        return open_host

    def _ssh_host(self, node: Node, files: ClusterFiles) -> Host:
        return ssh_host(node, files, lambda: why_gone(self.clients.ec2, node.instance.id))

    @property
    def flags(self) -> str:
        """The options that name this cluster, for commands in messages."""
        name = self.files.folder.name
        return f"--name {name} --cloud {self.cloud.name} --region {self.cloud.region}"


def ssh_host(node: Node, files: ClusterFiles, ask_why_gone: Callable[[], str] = str) -> Host:
    """A node over SSH at its public address; raises :class:`UsageError` without the cluster's key."""
    if not key_pair.read_public(files.key):
        raise missing_key(files)
    return SshHost(
        node.name,
        node.public_ip,
        files.login,
        alias=node.instance.id,
        ask_why_gone=ask_why_gone,
    )


def missing_key(files: ClusterFiles) -> UsageError:
    """What to say where only another machine can enter the cluster."""
    what = "on this machine is not the right one, or damaged"
    return UsageError(
        f"the cluster's key {what if files.key.exists() else 'is not on this machine'} ({files.key})",
        hint="use the machine that made the cluster; `spr-cluster down` works from any",
    )
