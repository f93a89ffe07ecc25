"""Network ACLs: the lowest number decides, both directions count, and parts of the internet do not."""

from __future__ import annotations

from typing import Any

import pytest

from infra.ec2.network_acls import NetworkAcl, Rule, install_flows, ssh_flows

CALLER = "198.51.100.9/32"
DENIED_SSH = f"network ACL acl-1 denies SSH (TCP in from {CALLER}, port 22): "


def entry(number: int, action: str = "allow", out: bool = False, **changes: Any) -> dict[str, Any]:
    basic = {"RuleNumber": number, "RuleAction": action, "Egress": out, "Protocol": "-1"}
    if ports := changes.pop("ports", ()):
        changes |= {"Protocol": "6", "PortRange": {"From": ports[0], "To": ports[1]}}
    return {**basic, "CidrBlock": "0.0.0.0/0", **changes}


OUT = entry(100, out=True)


@pytest.mark.parametrize(
    ("entries", "denial"),
    [
        ([entry(100), OUT, entry(32767, "deny")], ""),
        ([OUT, entry(32767, "deny")], f"{DENIED_SSH}no rule allows it"),
        ([entry(100), entry(90, "deny", ports=(20, 30)), OUT], f"{DENIED_SSH}rule 90"),
        ([entry(100), entry(90, "deny", CidrBlock="198.51.100.0/24"), OUT], f"{DENIED_SSH}rule 90"),
        # Another caller's, another protocol's, another port's, or after the one that decides.
        ([entry(100), entry(90, "deny", CidrBlock="198.51.100.8/32"), OUT], ""),
        ([entry(100), entry(90, "deny", Protocol="17"), OUT], ""),
        ([entry(100), entry(90, "deny", ports=(23, 1023)), OUT], ""),
        ([entry(80), entry(90, "deny"), OUT], ""),
        ([entry(100), {**entry(90, "deny"), "CidrBlock": None, "Ipv6CidrBlock": "::/0"}, OUT], ""),
        # Answers go to a port that the client chose.
        (
            [entry(100), entry(100, out=True, ports=(22, 60000))],
            f"network ACL acl-1 denies SSH responses (TCP out to {CALLER}, ports 49152-60999): no rule "
            "allows it",
        ),
        (
            [entry(100), entry(90, "deny", out=True, ports=(50000, 50001)), OUT],
            f"network ACL acl-1 denies SSH responses (TCP out to {CALLER}, ports 49152-60999): rule 90",
        ),
    ],
)
def test_what_a_caller_meets(entries: list[Any], denial: str) -> None:
    acl = NetworkAcl("acl-1", tuple(map(Rule.from_aws, entries)))

    assert acl.find_denial(ssh_flows(CALLER)) == denial


@pytest.mark.parametrize(
    ("entries", "denied"),
    [
        # A part of the internet that is denied is no reason; the whole of it is.
        ([entry(100), OUT, entry(90, "deny", CidrBlock="192.0.2.0/24")], ""),
        ([entry(100), OUT, entry(90, "deny", out=True, ports=(443, 443))], "port 443): rule 90"),
        ([entry(100), entry(90, out=True, ports=(443, 443))], "port 80): no rule"),
        ([entry(90, ports=(49152, 65535)), OUT], "download responses"),
        ([entry(100), OUT, entry(90, "deny", True, CidrBlock="0.0.0.0/1")], ""),
    ],
)
def test_what_an_installation_meets(entries: list[Any], denied: str) -> None:
    acl = NetworkAcl("acl-1", tuple(map(Rule.from_aws, entries)))

    assert denied in acl.find_denial(install_flows())
    assert bool(acl.find_denial(install_flows())) is bool(denied)
