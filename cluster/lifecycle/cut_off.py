"""Machines that run and can't be reached: what lies between them and this machine, looked at and named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta

from botocore.exceptions import BotoCoreError, ClientError

from cluster.context import Context
from cluster.nodes import Node
from infra.ec2.instances import Instance, describe_impaired
from infra.ec2.inventory import describe_inventory
from infra.ec2.network import Network, SecurityGroup
from infra.ec2.network_acls import describe_acls, ssh_flows
from infra.ec2.routes import describe_block, describe_ways
from infra.errors import SprError
from infra.wait import BOOT_DEADLINE_S
from infra.words import counted

_UNKNOWN = (SprError, ClientError, BotoCoreError)


def find_impaired(ctx: Context, machines: Iterable[Instance]) -> frozenset[str]:
    """Return the IDs of the machines that EC2's status checks call impaired.

    Bare metal may be impaired while it boots, so that is no reason until a boot takes no longer.
    """
    booting = ctx.now() - timedelta(seconds=BOOT_DEADLINE_S)
    ids = [m.id for m in machines if not (m.is_metal and m.launch_time > booting)]
    return describe_impaired(ctx.clients.ec2, ids) if ids else frozenset()


def explain_cut_off(ctx: Context, nodes: Sequence[Node], reason: str) -> SprError:
    """Return the error for machines that EC2 calls healthy, and none of which answers.

    ``reason`` is that of the last connection that failed.
    """
    ids = [node.instance.id for node in nodes]
    looks: list[Callable[[], Iterator[str]]] = [
        lambda: _look_at_routes(ctx, nodes),
        lambda: _look_at_block(ctx, nodes),
        lambda: _look_at_acls(ctx, nodes),
        lambda: _look_at_rule(ctx, nodes),
        lambda: _look_at_port(ctx, nodes),
    ]
    lines = [f"\n  {line}" for look in looks for line in _patiently(look)]
    ctx.events.record("cut off", counted(len(ids), "node"), resources=ids)
    again = "run the same command again" if ctx.command == "bake" else f"spr-cluster up {ctx.flags}"
    cost = " and cost money" if ctx.cloud.billed else ""
    return SprError(
        f"EC2's status checks are ok, but none of {counted(len(ids), 'node')} answers: {reason}. That is "
        f"the network, or what all of them have in common, so no machine was replaced. Looked at:"
        f"{''.join(lines)}\n  The machines were kept{cost}: {', '.join(ids)}.",
        hint=f"when the network is mended, continue: {again}; or remove them: "
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
    name = ctx.files.folder.name
    return describe_inventory(ctx.clients.ec2, name, ("security_groups",)).group


def _look_at_routes(ctx: Context, nodes: Sequence[Node]) -> Iterator[str]:
    for way in describe_ways(ctx.clients.ec2, _networks(nodes)).values():
        target = f"to {way.target}" if way.target else "nowhere"
        verdict = "" if way.is_public else ": NO ROUTE TO AN INTERNET GATEWAY"
        if way.is_inspected:
            verdict = ", a firewall endpoint; whether SSH passes is not known"
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
    """Look at the rules for this machine, or for the ranges from which private machines are reached."""
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
