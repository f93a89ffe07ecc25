"""Network ACLs of subnets: whether their rules allow SSH, its responses, and software installation.

ACLs are stateless, so both directions of a connection need a rule. They do not apply to traffic within
a subnet: https://docs.aws.amazon.com/vpc/latest/userguide/vpc-network-acls.html
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from infra.ec2.network import Network
from infra.ec2.routes import look_if_allowed
from infra.errors import UsageError

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client

_TCP = ("-1", "6")
_ACL_URL = "https://docs.aws.amazon.com/vpc/latest/userguide/custom-network-acl.html"
# The number of the last rule, which denies everything.
_LAST = 32767
_ANYWHERE = "0.0.0.0/0"
_ALL_PORTS = (0, 65535)
# The ephemeral ports common to Linux, macOS, and Windows. NAT may use others.
_CLIENT_PORTS = (49152, 60999)
_UBUNTU_PORTS = (32768, 60999)


@dataclass(frozen=True)
class Flow:
    """TCP packets from or to a range, with the receiver's ports; ``what`` is a noun for messages."""

    what: str
    cidr: str
    ports: tuple[int, int]
    is_outbound: bool = False

    def __str__(self) -> str:
        first, last = self.ports
        ports = f"port {first}" if first == last else f"ports {first}-{last}"
        way = f"out to {self.cidr}" if self.is_outbound else f"in from {self.cidr}"
        return f"{self.what} (TCP {way}, {ports})"


@dataclass(frozen=True)
class Rule:
    """A network ACL rule. The matching rule with the lowest number decides."""

    number: int
    is_outbound: bool
    allows: bool
    cidr: str
    ports: tuple[int, int] = _ALL_PORTS
    is_tcp: bool = True

    @staticmethod
    def from_aws(entry: Any) -> Rule:
        ports, protocol = entry.get("PortRange") or {}, str(entry["Protocol"])
        return Rule(
            number=entry["RuleNumber"],
            is_outbound=entry["Egress"],
            allows=entry["RuleAction"] == "allow",
            cidr=entry.get("CidrBlock") or entry["Ipv6CidrBlock"],
            ports=(ports.get("From", 0), ports.get("To", 65535)) if protocol == "6" else _ALL_PORTS,
            is_tcp=protocol in _TCP,
        )


@dataclass(frozen=True)
class NetworkAcl:
    """A network ACL with its rules."""

    id: str
    rules: tuple[Rule, ...]

    def find_denial(self, flows: Iterable[Flow]) -> str:
        """Explain which flow the ACL denies entirely at some port; return "" if it denies none.

        Ignores rules that deny only part of a flow's range: they are common.
        """
        for flow in flows:
            rules = [r for r in self.rules if r.is_tcp and r.is_outbound == flow.is_outbound]
            rules = sorted((r for r in rules if _decides(r, flow)), key=lambda r: r.number)
            for port in _edges_of_ports(flow, rules):
                first = next((r for r in rules if r.ports[0] <= port <= r.ports[1]), None)
                if first and first.allows:
                    continue
                by = (
                    f"rule {first.number}"
                    if first and first.number < _LAST
                    else "no rule allows it"
                )
                return f"network ACL {self.id} denies {flow}: {by}"
        return ""


def _decides(rule: Rule, flow: Flow) -> bool:
    """Return whether a rule allows some of a flow's range, or denies all of it."""
    one, other = ipaddress.ip_network(rule.cidr), ipaddress.ip_network(flow.cidr)
    if one.version != other.version or not one.overlaps(other):
        return False
    return rule.allows or one.prefixlen <= other.prefixlen


def _edges_of_ports(flow: Flow, rules: Sequence[Rule]) -> set[int]:
    """Return one port of each section of the flow's ports with the same rules."""
    first, last = flow.ports
    edges = {first, *(r.ports[0] for r in rules), *(r.ports[1] + 1 for r in rules)}
    return {port for port in edges if first <= port <= last}


def ssh_flows(caller: str) -> tuple[Flow, ...]:
    """Return the flows of SSH from a range."""
    return (
        Flow("SSH", caller, (22, 22)),
        Flow("SSH responses", caller, _CLIENT_PORTS, is_outbound=True),
    )


def install_flows() -> tuple[Flow, ...]:
    """Return the flows of software installation, from Ubuntu's archive and the package index."""
    return (
        Flow("downloads", _ANYWHERE, (443, 443), is_outbound=True),
        Flow("downloads", _ANYWHERE, (80, 80), is_outbound=True),
        Flow("download responses", _ANYWHERE, _UBUNTU_PORTS),
    )


def describe_acls(ec2: EC2Client, networks: Sequence[Network]) -> dict[str, NetworkAcl]:
    """Return the subnets' network ACLs by subnet ID."""
    subnets = [network.subnet_id for network in networks]
    pages = ec2.get_paginator("describe_network_acls").paginate(
        Filters=[{"Name": "association.subnet-id", "Values": subnets}]
    )
    return {
        association.get("SubnetId", ""): NetworkAcl(
            acl["NetworkAclId"], tuple(map(Rule.from_aws, acl.get("Entries", [])))
        )
        for page in pages
        for acl in page["NetworkAcls"]
        for association in acl.get("Associations", [])
        if association.get("SubnetId") in subnets
    }


def require_open_acls(
    ec2: EC2Client, networks: Sequence[Network], flows: Sequence[Flow], note: Callable[[str], None]
) -> list[Network]:
    """Return the subnets whose network ACL allows these flows.

    Without permission to read ACLs, notes that and returns all subnets. Raises :class:`UsageError` if
    no subnet is left.
    """
    if not networks:
        return []
    acls = look_if_allowed(lambda: describe_acls(ec2, networks), dict[str, NetworkAcl](), note)
    denials = {subnet_id: acl.find_denial(flows) for subnet_id, acl in acls.items()}
    left = [network for network in networks if not denials.get(network.subnet_id)]
    if not left:
        first = networks[0].subnet_id
        alike = [n for n in networks if denials[n.subnet_id] == denials[first]]
        more = f" and {len(alike) - 1} more" if alike[1:] else ""
        raise UsageError(
            f"{first}{more}: {denials[first]}",
            hint="choose another subnet with --subnet-id, or ask an administrator to allow it "
            f"({_ACL_URL})",
        )
    return left
