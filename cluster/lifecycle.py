"""``up`` and ``down``: a plan applied action by action, over EC2 and SSH."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone

from cluster import mesh, verify
from cluster.files import ClusterFiles, remembered_cloud, render_cloud_line
from cluster.nodes import Cluster, HostOpener, Node, rank_nodes
from infra import access, images, instances, network, tags
from infra.clients import Clients
from infra.cloud import Cloud
from infra.errors import SprError, UsageError
from infra.instances import HEAD, WORKER, LaunchRequest
from infra.inventory import Inventory, describe_inventory
from infra.plan import ActionKind, Plan, plan_down
from infra.progress import Progress, Silent
from infra.removal import remove
from infra.spec import ClusterSpec
from infra.wait import BOOT_DEADLINE_S, CONSISTENCY_DEADLINE_S, Clock, SystemClock, wait_until
from provision.bake import bake_image
from provision.facts import HostFacts, gather_facts
from provision.host import Host, on_all, wait_until_reachable
from provision.install import install_stack, wait_for_cloud_init
from provision.ssh import SshHost
from provision.stacks import Stack
from provision.user_data import render_user_data


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
        opened: dict[str, Host] = {}

        def open_host(node: Node) -> Host:
            if node.instance.id not in opened:
                opened[node.instance.id] = (self.make_host or ssh_host)(node, self.files)
            return opened[node.instance.id]

        return open_host


def ssh_host(node: Node, files: ClusterFiles) -> Host:
    """A node over SSH at its public address; raises :class:`UsageError` without the cluster's key."""
    if not files.key.exists():
        raise UsageError(
            f"the cluster's key is not on this machine ({files.key})",
            hint="use the machine that made the cluster; `spr-cluster down` works from any",
        )
    return SshHost(node.name, node.public_ip, files.login)


def check_name_is_free(ctx: Context, cluster: str) -> None:
    """Raises :class:`UsageError` where anything of that name exists, here or in another cloud."""
    elsewhere = remembered_cloud(cluster)
    if elsewhere and elsewhere != (ctx.cloud.name, ctx.cloud.region) and ctx.files.key.exists():
        raise UsageError(
            f"this machine holds the key of a cluster {cluster!r} in {' '.join(elsewhere)}",
            hint=f"choose another --name, or remove that one first: spr-cluster down --name {cluster} "
            f"--cloud {elsewhere[0]} --region {elsewhere[1]}",
        )
    found = describe_inventory(ctx.clients.ec2, cluster)
    if found:
        raise UsageError(
            f"cluster {cluster!r} already exists: {found.counts()}",
            hint=f"`spr-cluster status --name {cluster}` shows it, `spr-cluster down --name "
            f"{cluster}` removes it, another --name makes another",
        )


class Up:
    """One ``up``: applies a plan's actions and carries what each leaves for the next."""

    def __init__(self, ctx: Context, spec: ClusterSpec, stack: Stack) -> None:
        self.ctx, self.spec, self.stack = ctx, spec, stack
        self.open_host = ctx.host_opener()
        self.network = network.choose_network(ctx.clients.ec2, spec)
        self.image = images.find_ubuntu_image(ctx.clients.ssm, ctx.clients.ec2, stack.ubuntu)
        self.expires = ctx.now() + spec.ttl
        self.group_id = ""
        self.nodes: tuple[Node, ...] = ()
        self.facts: dict[str, HostFacts] = {}

    @property
    def cluster(self) -> Cluster:
        return Cluster(self.spec.name, self.nodes)

    def apply(self, plan: Plan) -> Cluster:
        """Carry out a plan; what exists when it fails is for ``down`` to find by its tags."""
        self.expires = self.ctx.now() + self.spec.ttl
        steps: dict[ActionKind, Callable[[], None]] = {
            ActionKind.CREATE_GROUP: self._create_group,
            ActionKind.IMPORT_KEY: self._import_key,
            ActionKind.RUN_HEAD: self._run_head,
            ActionKind.INSTALL: self._install,
            ActionKind.CREATE_IMAGE: self._create_image,
            ActionKind.RUN_WORKERS: self._run_workers,
            ActionKind.CONNECT: self._connect,
            ActionKind.VERIFY: self._verify,
        }
        for action in plan.actions:
            with self.ctx.progress.phase(action.title):
                steps[action.kind]()
        return self.cluster

    def _create_group(self) -> None:
        ec2 = self.ctx.clients.ec2
        self.group_id = network.create_security_group(ec2, self.spec, self.network)

    def _import_key(self) -> None:
        files, cloud = self.ctx.files, self.ctx.cloud
        key = access.generate_key_pair(access.key_name(self.spec.name))
        files.remove()
        access.write_private(files.key, key.private)
        access.write_private(files.ssh_config, render_cloud_line(cloud.name, cloud.region))
        access.import_key_pair(self.ctx.clients.ec2, self.spec.name, key.public)

    def _run_head(self) -> None:
        self._launch(HEAD, 1)
        self.ctx.progress.note(verify.require_amx(self.facts, required=self.spec.amx_required))

    def _run_workers(self) -> None:
        self._launch(WORKER, self.spec.workers)
        self.ctx.progress.note(verify.require_amx(self.facts, required=self.spec.amx_required))

    def _launch(self, role: str, count: int) -> None:
        """Buy machines, then wait until EC2, SSH, cloud-init and their own facts show them."""
        if self.ctx.now() >= self.expires:
            raise SprError(
                f"the time to live is over before the {role} nodes were bought",
                hint="bare metal takes up to 20 minutes to start, an image may take an hour: "
                "a longer --ttl",
            )
        labels = {
            tags.STACK: self.stack.name,
            tags.NODES: str(self.spec.nodes),
            tags.EXPIRES: tags.render_time(self.expires),
        }
        bought = instances.run_instances(
            self.ctx.clients.ec2,
            LaunchRequest(
                spec=self.spec,
                role=role,
                count=count,
                image=self.image,
                subnet_id=self.network.subnet_id,
                group_id=self.group_id,
                user_data=render_user_data(self.expires),
                labels=labels,
            ),
        )
        running = instances.wait_until_running(
            self.ctx.clients.ec2,
            [instance.id for instance in bought],
            on_wait=self._note_minutes(f"{role} starting"),
            clock=self.ctx.clock,
        )
        known = {node.instance.id for node in self.nodes}
        self.nodes = rank_nodes((*(node.instance for node in self.nodes), *running))
        self._write_ssh_config()
        fresh = [node for node in self.nodes if node.instance.id not in known]
        self.facts.update(self._reach([self.open_host(node) for node in fresh]))

    def _reach(self, hosts: Sequence[Host]) -> dict[str, HostFacts]:
        limit = BOOT_DEADLINE_S // 60

        def note(passed: float, reason: str) -> None:
            minutes = f"waiting for SSH, {passed / 60:.0f} min of at most {limit}"
            # Refusals of the first minute are a machine's ordinary way to boot.
            self.ctx.progress.note(f"{minutes}: {reason}" if passed > 60 else minutes)

        def reach(host: Host) -> HostFacts:
            wait_until_reachable(host, clock=self.ctx.clock, on_wait=note)
            wait_for_cloud_init(host)
            return gather_facts(host)

        return on_all("reaching the nodes", hosts, reach)

    def _note_minutes(self, what: str) -> Callable[[float], None]:
        limit = BOOT_DEADLINE_S // 60
        return lambda passed: self.ctx.progress.note(
            f"{what}, {passed / 60:.0f} min of at most {limit}"
        )

    def _write_ssh_config(self) -> None:
        files, cloud = self.ctx.files, self.ctx.cloud
        text = mesh.render_client_ssh_config(self.cluster, str(files.key), str(files.known_hosts))
        access.write_private(files.ssh_config, render_cloud_line(cloud.name, cloud.region) + text)

    def _install(self) -> None:
        install_stack(self.open_host(self.cluster.head), self.stack, self.ctx.progress)

    def _create_image(self) -> None:
        head = self.cluster.head
        self.image = bake_image(
            self.ctx.clients.ec2,
            self.open_host(head),
            head.instance.id,
            self.spec.name,
            self.ctx.progress,
            self.ctx.clock,
        )
        # An image can take an hour; a connection that lay idle so long may be dead unnoticed.
        self.open_host(head).close()

    def _connect(self) -> None:
        mesh.connect_nodes(self.cluster, self.facts, self.open_host)

    def _verify(self) -> None:
        answers = verify.verify_cluster(
            self.cluster,
            self.open_host(self.cluster.head),
            amx_required=self.spec.amx_required,
        )
        with_amx = sum(not answer.missing_amx for answer in answers)
        self.ctx.progress.note(
            f"{len(answers)} of {self.spec.nodes} nodes answer the head, {with_amx} have AMX"
        )


def down(ctx: Context, name: str, found: Inventory, *, keep_image: bool) -> Inventory:
    """Remove what was found of a cluster and prove it; returns what was kept on purpose.

    Raises :class:`SprError` naming whatever EC2 still shows in the end.
    """
    for action in plan_down(found, keep_image=keep_image).actions:
        with ctx.progress.phase(action.title):
            remove(ctx.clients.ec2, action, ctx.clock)
    with ctx.progress.phase("Check: what still carries the cluster's tag"):
        left = _wait_until_gone(ctx, name, keep_image=keep_image)
    if remembered_cloud(name) in (None, (ctx.cloud.name, ctx.cloud.region)):
        ctx.files.remove(keep_cloud=bool(left))
    return left


def _wait_until_gone(ctx: Context, name: str, *, keep_image: bool) -> Inventory:
    left = Inventory()

    def probe() -> bool | None:
        nonlocal left
        left = describe_inventory(ctx.clients.ec2, name)
        return None if (left.without_image() if keep_image else left) else True

    try:
        wait_until("", probe, deadline_s=CONSISTENCY_DEADLINE_S, clock=ctx.clock)
    except SprError:
        raise SprError(
            f"still there after `down`: {left}",
            hint=f"run `spr-cluster down --name {name}` again; these may still cost money",
        ) from None
    return left
