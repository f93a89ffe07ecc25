"""What lifecycle code works with: the cloud, its clients, local files, event log, clock, and progress."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError

from cluster.access import Access, FollowedHost
from cluster.local_files import (
    ClusterFiles,
    EventLog,
    describe_failure,
    place_options,
    remembered_cloud,
    utc_now,
)
from cluster.nodes import Cluster, HostOpener, Node, find_cluster
from cluster.ssh_mesh import render_client_ssh_config
from infra.aws.clients import Clients
from infra.aws.cloud import Cloud, find_profile
from infra.ec2 import key_pair, tags
from infra.ec2.cluster_record import ClusterRecord, parse_record
from infra.ec2.instances import why_gone
from infra.ec2.inventory import describe_inventory
from infra.ec2.network import SecurityGroup
from infra.errors import SprError, UsageError
from infra.files import read_text, write_private
from infra.plan.actions import Action
from infra.plan.ownership import split_groups
from infra.spec import or_other_name
from infra.wait import Clock, Progress, Silent, start_thread
from provision.host import Host
from provision.jump import Gateway, proxy_argv
from provision.ssh import SshHost

# If the network drops packets, the SDK alone would try for minutes.
_RECORD_S = 20.0


@dataclass(frozen=True)
class Context:
    """Everything that lifecycle code needs; tests replace the parts that reach outside."""

    cloud: Cloud
    clients: Clients
    files: ClusterFiles
    progress: Progress = field(default_factory=Silent)
    clock: Clock = time
    now: Callable[[], datetime] = utc_now
    make_host: Callable[[Node, ClusterFiles], Host] | None = None
    command: str = ""
    """The running command, for the event log: ``up``."""
    allow: Callable[[str], bool] = lambda _question: False
    """Asks the user whether to open SSH to this machine's new address."""

    @property
    def name(self) -> str:
        """The cluster's name."""
        return self.files.folder.name

    @cached_property
    def access(self) -> Access:
        return Access(self)

    @property
    def events(self) -> EventLog:
        return EventLog(self.files.events, self.command, self.now)

    def remember(self, ssh_config: str = "") -> None:
        """Record on this machine where the cluster is and which credentials created it."""
        cloud = self.cloud
        self.files.remember(
            cloud.name,
            cloud.region,
            ssh_config,
            folder=cloud.folder,
            account=self.clients.caller.account,
            profile=find_profile(cloud.session),
        )

    def owner_labels(self, group: SecurityGroup | None) -> dict[str, str]:
        """Return the owner tags: who created the cluster, which never changes, and the key."""
        owner = group.tags.get(tags.OWNER) if group else None
        key = key_pair.fingerprint(key_pair.read_public(self.files.key))
        return {tags.OWNER: owner or self.clients.caller.owner, tags.OWNER_KEY: key}

    @contextmanager
    def perform(self, action: Action) -> Iterator[None]:
        """Show and record an action: a context manager."""
        with self.progress.phase(action.title):
            self.events.record_action("begun", action)
            try:
                yield
            except BaseException as error:
                self.events.record_action("failed", action, describe_failure(error))
                raise
            self.events.record_action("done", action)

    def host_opener(self) -> HostOpener:
        """Return a function that opens each node once and keeps its connection."""
        opened: dict[tuple[str, str], Host] = {}
        # Created here, because concurrent threads would each make their own.
        access, gateway = self.access, Gateway()

        def open_host(node: Node) -> Host:
            # A node with a new rank is opened again, under its new name.
            key = (node.instance.id, node.name)
            if key not in opened:
                make = self.make_host or partial(self._ssh_host, gateway=gateway)
                host = make(node, self.files)
                opened[key] = FollowedHost(host, access) if node.is_public else host
            return opened[key]

        return open_host

    def _ssh_host(self, node: Node, files: ClusterFiles, gateway: Gateway | None = None) -> Host:
        self.require_key()
        id_ = node.instance.id
        return SshHost(
            node.name,
            node.address,
            files.login,
            alias=id_,
            region=self.cloud.region,
            proxy=proxy_argv(node.jump, id_, node.address, self.cloud.region),
            gateway=gateway,
            why_gone=lambda: why_gone(self.clients.ec2, id_),
        )

    def require_key(self) -> None:
        """Raise :class:`UsageError` unless this machine has the cluster's key, readable by its user only."""
        key = self.files.key
        if not key_pair.read_public(key):
            what = "on this machine is damaged or not the right one"
            raise UsageError(
                f"the cluster's key {what if key.exists() else 'is not on this machine'} ({key})",
                hint="use the machine that made the cluster, or let `ssh --authorize` there add your key; "
                f"`spr-cluster down {self.flags}` works from any machine",
            )
        # OpenSSH also refuses such a key.
        if (mode := key.stat().st_mode & 0o777) & 0o077:
            raise UsageError(
                f"the cluster's key is readable by other users ({key}, mode {mode:o}); it was not used",
                hint=f"chmod 600 {shlex.quote(str(key))}",
            )

    def find_cluster(self) -> Cluster:
        """Return the running cluster. Raises :class:`UsageError` if there is none."""
        return find_cluster(self.clients.ec2, self.cloud, self.name, self.now())

    def write_ssh_config(self, cluster: Cluster) -> None:
        """Let `ssh` on this machine reach the nodes by their names."""
        self.remember(self._render_ssh_config(cluster))
        write_private(self.files.ssh_hosts, self._render_ssh_config(cluster, f"{cluster.name}-"))

    def _render_ssh_config(self, cluster: Cluster, prefix: str = "") -> str:
        files, region = self.files, self.cloud.region
        return render_client_ssh_config(
            cluster, str(files.key), str(files.known_hosts), region, prefix
        )

    def learn_nodes(self, cluster: Cluster) -> Path:
        """Return the SSH configuration for the nodes, written here if another machine ran `up`.

        Raises :class:`UsageError` if it is that of a cluster with the same name in another place.
        """
        files = self.files
        self.require_own_files()
        with suppress(OSError, BotoCoreError, ClientError, SprError):
            known = read_text(files.ssh_hosts, "", errors="replace")
            is_new = known != self._render_ssh_config(cluster, f"{cluster.name}-")
            if is_new and files.key.exists():
                self.write_ssh_config(cluster)
        return files.ssh_config

    def require_own_files(self) -> None:
        """Raise :class:`UsageError` if this machine's files are those of a cluster in another place."""
        elsewhere, here = remembered_cloud(self.name), (self.cloud.name, self.cloud.region)
        if elsewhere and elsewhere != here and self.files.key.exists():
            raise UsageError(
                f"this machine has the key of another cluster {self.name!r}, in {' '.join(elsewhere)}, "
                f"not in {' '.join(here)}",
                hint=f"{or_other_name(self.name)}remove that cluster: spr-cluster down --name "
                f"{self.name} --cloud {elsewhere[0]} --region {elsewhere[1]}; or set SPR_CLUSTER_HOME to "
                "another folder",
            )

    def find_expiry(self) -> datetime | None:
        """Return when the cluster's nodes will shut down; ``None`` if EC2 doesn't say."""
        record = self.find_record()
        return record.expires if record else None

    def find_job_end(self) -> datetime | None:
        """Return when they shut down at the latest while a job with a limit runs."""
        record = self.find_record()
        return record.job_ends if record else None

    def is_gone(self) -> bool:
        """Return whether EC2 has no node of the cluster, or only those of a later one with its name."""
        with suppress(BotoCoreError, ClientError, SprError):
            found = describe_inventory(self.clients.ec2, self.name, ("instances",)).alive
            key = key_pair.fingerprint(key_pair.read_public(self.files.key))
            return all(each.tags.get(tags.OWNER_KEY, key) != key for each in found)
        return False

    def find_record(self, *, only_own: bool = False) -> ClusterRecord | None:
        """Return the cluster's record; ``None`` if EC2 doesn't say within seconds.

        With ``only_own``, a cluster of this name that has another key does not count.
        """
        with suppress(BotoCoreError, ClientError, SprError, FutureTimeoutError):
            # boto3 can create clients in one thread only.
            look = partial(describe_inventory, self.clients.ec2, self.name, ("security_groups",))
            found = start_thread(look).result(_RECORD_S)
            own, _ = split_groups(found, key_pair.read_public(self.files.key))
            group = own or (None if only_own else found.group)
            return parse_record(group.tags) if group else None
        return None

    @property
    def flags(self) -> str:
        """The options that name this cluster, for commands in messages."""
        place = place_options(self.name, self.cloud.name, self.cloud.region)
        return f"--name {self.name}{place}"
