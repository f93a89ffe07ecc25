"""Waits for nodes after launch (SSH, cloud-init, facts), and explains what blocks those that fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial

from botocore.exceptions import BotoCoreError, ClientError

from cluster.context import Context
from cluster.nodes import HostOpener, Node
from infra.ec2.instances import Instance, describe_by_id, describe_impaired
from infra.ec2.inventory import find_group
from infra.ec2.network import Network, SecurityGroup
from infra.ec2.network_acls import describe_acls, ssh_flows
from infra.ec2.routes import describe_block, describe_ways
from infra.errors import HostError, JumpError, SprError
from infra.wait import BOOT_DEADLINE_S
from infra.words import counted
from provision.facts import HostFacts, gather_facts
from provision.host import CONNECT_TIMEOUT_S, Host, wait_until_reachable
from provision.install import persist, wait_for_cloud_init
from provision.run_on_nodes import on_all, on_each

_UNKNOWN = (SprError, ClientError, BotoCoreError)


def find_impaired(ctx: Context, machines: Iterable[Instance]) -> frozenset[str]:
    """Return the IDs of the machines that EC2's status checks call impaired.

    Bare metal may be impaired while it boots, so it counts only after the longest boot time.
    """
    booting = ctx.now() - timedelta(seconds=BOOT_DEADLINE_S)
    ids = [m.id for m in machines if not (m.is_metal and m.launch_time > booting)]
    return describe_impaired(ctx.clients.ec2, ids) if ids else frozenset()


def explain_cut_off(ctx: Context, nodes: Sequence[Node], reason: str) -> SprError:
    """Return the error for machines that EC2 calls healthy although none answers.

    ``reason`` is why the last connection failed.
    """
    ids = [node.instance.id for node in nodes]
    looks = (_look_at_routes, _look_at_block, _look_at_acls, _look_at_rule, _look_at_port)
    lines = [f"\n  {line}" for look in looks for line in _patiently(partial(look, ctx, nodes))]
    ctx.events.record("cut off", counted(len(ids), "node"), resources=ids)
    again = "run the same command again" if ctx.command == "bake" else f"spr-cluster up {ctx.flags}"
    cost = " and cost money" if ctx.cloud.billed else ""
    return SprError(
        f"EC2's status checks are ok, but none of {counted(len(ids), 'node')} answers: {reason}. That is "
        f"the network, or what all of them have in common, so no machine was replaced. Looked at:"
        f"{''.join(lines)}\n  The machines were kept{cost}: {', '.join(ids)}.",
        hint=f"when the network is fixed, continue: {again}; or remove them: "
        f"spr-cluster down {ctx.flags}",
    )


def _patiently(look: Callable[[], Iterator[str]]) -> list[str]:
    try:
        return list(look())
    except _UNKNOWN as error:
        return [f"not known: {getattr(error, 'message', '') or error}"]


def _networks(nodes: Sequence[Node]) -> list[Network]:
    machines = [node.instance for node in nodes]
    return sorted({Network(m.vpc_id, m.subnet_id, m.zone) for m in machines}, key=str)


def _group_of(ctx: Context) -> SecurityGroup | None:
    return find_group(ctx.clients.ec2, ctx.name).group


def _look_at_routes(ctx: Context, nodes: Sequence[Node]) -> Iterator[str]:
    for way in describe_ways(ctx.clients.ec2, _networks(nodes)).values():
        target = f"to {way.target}" if way.target else "nowhere"
        verdict = "" if way.is_public else ": NO ROUTE TO AN INTERNET GATEWAY"
        if way.is_inspected:
            verdict = ", a firewall endpoint, which may or may not allow SSH"
        if not nodes[0].is_public:
            inside = "are reached from inside" if nodes[0].public_ip else "have no public addresses"
            verdict = f", and the machines {inside}"
        yield f"route table {way.table_id} of {way.subnet_id} leads {target}{verdict}"


def _look_at_block(ctx: Context, nodes: Sequence[Node]) -> Iterator[str]:
    # SSH to a private address does not come from the internet.
    outward = not nodes[0].is_public
    mode, closed = describe_block(ctx.clients.ec2, _networks(nodes), outward=outward)
    yield f"VPC Block Public Access: {mode}" + (", AND CLOSES THESE SUBNETS" if closed else "")


def _look_at_acls(ctx: Context, nodes: Sequence[Node]) -> Iterator[str]:
    """Check the rules for this machine, or for private machines, the ranges that may use SSH."""
    group = None if nodes[0].is_public else _group_of(ctx)
    callers = group.ssh_cidrs if group else [ctx.cloud.caller_cidr()]
    flows = [flow for caller in callers for flow in ssh_flows(caller)]
    for subnet_id, acl in describe_acls(ctx.clients.ec2, _networks(nodes)).items():
        denial = acl.find_denial(flows).replace(" denies ", " DENIES ")
        yield f"{subnet_id}: {denial or f'network ACL {acl.id} lets SSH through'}"


def _look_at_rule(ctx: Context, nodes: Sequence[Node]) -> Iterator[str]:
    group = _group_of(ctx)
    if group is None:
        yield "security group: MISSING"
        return
    allows = f"security group {group.id} allows SSH from {', '.join(group.ssh_cidrs) or 'nowhere'}"
    if not nodes[0].is_public:
        yield f"{allows}; this machine comes {f'over {nodes[0].jump}' if nodes[0].jump else 'directly'}"
        return
    caller = ctx.cloud.caller_cidr()
    verdict = "allowed" if group.admits(caller) else "NOT ALLOWED: see --ssh-cidr"
    yield f"{allows}; this machine is {caller}: {verdict}"


def _look_at_port(ctx: Context, nodes: Sequence[Node]) -> Iterator[str]:
    if not nodes[0].is_public:
        return
    blocked = ctx.cloud.probe_ssh()
    verdict = f"SEEM BLOCKED: {blocked}" if blocked else "no fault found"
    yield f"connections from this machine to port 22: {verdict}"


# A machine that has been running for longer than a boot takes is no longer booting.
_REACH_AGAIN_S = 5 * 60
_STATUS_EVERY_S = 60.0
# Machines that are up according to EC2's status checks answer within this time, or not at all.
_CUT_OFF_S = 3 * 60
# Session Manager does not know the machine yet. Its agent tries again to register after 5 to 30 minutes:
# https://github.com/aws/amazon-ssm-agent/blob/mainline/core/app/credentialrefresher/credentialrefresher_deps.go
_UNREGISTERED = "TargetNotConnected"
_REGISTER_S = 35 * 60
_BOOTING = {"?", "initializing", "insufficient-data"}
# Status checks are requested for a few slow nodes, not for the whole cluster.
_MOST_STATUSES = 10


class _CutOffError(HostError):
    """EC2's status checks are ok, but no node answers: the fault is between this machine and the nodes."""


class _Stragglers:
    """Nodes that do not answer yet, and why, for one progress note about all of them.

    ``witness`` is a node that answered before, if there is one.
    """

    def __init__(
        self, ctx: Context, nodes: Sequence[Node], open_host: HostOpener, witness: Node | None
    ) -> None:
        self.ctx, self.nodes, self.open_host, self.witness = ctx, nodes, open_host, witness
        self.heard: list[Node] = []
        self.not_tried = set[str]()
        """Instances whose last connection failed at the jump, before it reached them."""
        self.ok_since: float | None = None
        self.waiting: dict[str, tuple[Node, str]] = {}
        self.lock = threading.Lock()
        self.asked_at = ctx.clock.monotonic()
        self.gone: dict[str, str] = {}
        self.statuses = ""
        self.states = dict[str, str]()
        """EC2's last status checks, by instance ID."""

    def wait_for(self, node: Node, host: Host) -> None:
        """Wait until a node answers, also for the agent of one that has taken long to boot."""
        clock, begun = self.ctx.clock, self.ctx.clock.monotonic()
        age = (self.ctx.now() - node.instance.launch_time).total_seconds()

        def wait(deadline_s: float) -> None:
            wait_until_reachable(
                host,
                deadline_s=deadline_s,
                clock=clock,
                on_wait=lambda _, reason: self.report(node, clock.monotonic() - begun, reason),
            )

        try:
            wait(max(_REACH_AGAIN_S, BOOT_DEADLINE_S - age))
        except HostError as error:
            left = BOOT_DEADLINE_S + _REGISTER_S - age - (clock.monotonic() - begun)
            given_up = isinstance(error, _CutOffError) or _UNREGISTERED not in error.message
            # It never booted.
            given_up = given_up or self.states.get(node.instance.id, "ok") != "ok"
            if given_up or left <= 0:
                raise
            wait(left)

    def report(self, node: Node, passed: float, reason: str) -> None:
        """Note that a node does not answer. Raises :class:`HostError` if EC2 says it never will."""
        with self.lock:
            self.waiting[node.name] = node, reason
            self._ask_ec2()
            if self.find_cut_off():
                raise _CutOffError(node.name, reason.removeprefix(f"[{node.name}] "))
            if gone := self.gone.get(node.instance.id):
                raise HostError(node.name, gone)
            names = ", ".join(sorted(self.waiting)[:4])
            more = f" and {len(self.waiting) - 4} more" if len(self.waiting) > 4 else ""
            longest = BOOT_DEADLINE_S + (_REGISTER_S if _UNREGISTERED in reason else 0)
            text = f"waiting for SSH on {names}{more}: {passed / 60:.0f} min of at most {longest // 60}"
            # Refused connections are normal during the first minute of a boot.
            if passed > _STATUS_EVERY_S:
                text += f"; {self.statuses}{reason}"
                if _UNREGISTERED in reason:
                    text += "; its agent may try again to register only after 5 to 30 min"
            self.ctx.progress.note(text)

    def done(self, node: Node) -> None:
        with self.lock:
            self.waiting.pop(node.name, None)

    def find_cut_off(self) -> bool:
        """Return whether no node has answered for too long although EC2 says that they are up."""
        if self.heard or self.ok_since is None:
            return False
        unregistered = any(_UNREGISTERED in reason for _, reason in self.waiting.values())
        patience = _REGISTER_S if unregistered else _CUT_OFF_S
        if self.ctx.clock.monotonic() - self.ok_since < patience:
            return False
        if self.witness and self.answers(self.witness):
            self.heard.append(self.witness)
        return not self.heard

    def require_way(self, nodes: Sequence[Node], failed: Mapping[str, str]) -> None:
        """Raise :class:`SprError` if no node answers and EC2 finds no fault with one that failed.

        ``failed`` are reasons by instance ID.
        """
        known = {node.instance.id: node for node in (*self.heard, self.witness) if node}
        if not failed or not (known or self.ok_since is not None):
            return
        asked = describe_by_id(self.ctx.clients.ec2, list(failed.keys() | known.keys()))
        gone = {instance.id for instance in asked if instance.why_gone}
        bad = gone | find_impaired(self.ctx, (i for i in asked if i.id in failed))
        lost = [why for id_, why in failed.items() if id_ not in bad]
        left = [node for id_, node in known.items() if id_ not in gone]
        # Nodes that answered but are gone say nothing about the network.
        if not lost or (known and not left):
            return
        is_open = any(on_all("looking for a way", left, self.answers).values())
        not_tried = self.not_tried.intersection(failed) - bad
        if not is_open or not_tried:
            ids = not_tried if is_open else {node.instance.id for node in nodes} - bad
            kept = [node for node in nodes if node.instance.id in ids]
            raise explain_cut_off(self.ctx, kept, lost[0])

    def answers(self, node: Node) -> bool:
        """Return whether a new connection to a node succeeds."""
        host = self.open_host(node)
        host.close()
        self.not_tried.discard(node.instance.id)
        try:
            return host.run("true", timeout_s=CONNECT_TIMEOUT_S).exit_code == 0
        except JumpError:
            self.not_tried.add(node.instance.id)
            return False
        except HostError:
            return False

    def _ask_ec2(self) -> None:
        """Once a minute, get EC2's view of all nodes that have not answered: which are gone, and the checks.

        Some are no longer waited for, and others have not reported yet.
        """
        now = self.ctx.clock.monotonic()
        if now - self.asked_at < _STATUS_EVERY_S:
            return
        self.asked_at = now
        ec2 = self.ctx.clients.ec2
        waiting = [node.instance.id for node, _ in self.waiting.values()]
        past = {*waiting, *(node.instance.id for node in self.heard)}
        others = [node.instance.id for node in self.nodes if node.instance.id not in past]
        try:
            asked = describe_by_id(ec2, [*waiting, *others])
            self.gone |= {i.id: i.why_gone for i in asked if i.why_gone}
            some = [id_ for id_ in waiting if id_ not in self.gone][:_MOST_STATUSES]
            if not some:
                self.ok_since = None
                return
            late = [id_ for id_ in others if id_ not in self.gone][:_MOST_STATUSES]
            found = ec2.describe_instance_status(InstanceIds=[*some, *late])["InstanceStatuses"]
        except (ClientError, BotoCoreError):
            return
        status = {s["InstanceId"]: s.get("InstanceStatus", {}).get("Status", "?") for s in found}
        self.states |= status
        known = [status[id_] for id_ in some if id_ in status]
        words = sorted(set(known))
        # Wait for machines that are still booting. Machines that never booted may mean that the others are
        # faulty as well, unless more of those are up.
        never_booted = sum(status.get(id_) in _BOOTING for id_ in late)
        if _BOOTING & set(words) or known.count("ok") <= never_booted:
            self.ok_since = None
        elif self.ok_since is None:
            self.ok_since = now
        self.statuses = f"EC2's status checks: {', '.join(words)}; " if words else ""


def reach_nodes(
    ctx: Context, nodes: Sequence[Node], open_host: HostOpener, witness: Node | None = None
) -> tuple[dict[str, HostFacts], dict[str, str]]:
    """Return the facts of nodes that answer, and why the others do not, by instance ID.

    ``witness`` answered before. Raises :class:`HostKeyError` for a machine whose host key has changed,
    and :class:`SprError` if the network is at fault.
    """
    stragglers = _Stragglers(ctx, nodes, open_host, witness)

    def reach(node: Node) -> HostFacts:
        host = open_host(node)
        try:
            stragglers.wait_for(node, host)
            stragglers.heard.append(node)
            wait_for_cloud_init(host, ctx.clock)
            return persist(host, lambda: gather_facts(host), ctx.clock)
        finally:
            stragglers.done(node)

    answers = on_each(nodes, reach)
    silent = [node for node in nodes if answers[node.name].error]
    awake = on_all("looking for a way", silent, stragglers.answers)
    is_back = any(awake.values()) or not stragglers.find_cut_off()
    # If the network is back, nodes given up because of it get their full time again.
    again = [
        node
        for node in silent
        if awake[node.name] or (is_back and isinstance(answers[node.name].error, _CutOffError))
    ]
    answers |= on_each(again, reach)
    ids = {node.name: node.instance.id for node in nodes}
    facts = {ids[name]: answer.value for name, answer in answers.items() if answer.value}
    failed = {ids[name]: answer.reason for name, answer in answers.items() if answer.error}
    stragglers.require_way(nodes, failed)
    return facts, failed
