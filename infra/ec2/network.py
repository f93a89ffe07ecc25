"""A cluster's network: zones and subnets, security group, and placement group."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from infra.aws.clients import DENIED, error_code, unless, when_visible
from infra.ec2 import tags
from infra.errors import UsageError
from infra.instance_types import INSTANCE_TYPES, WITH_AMX, InstanceType, nearest_type

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client
    from types_boto3_ec2.type_defs import (
        IpPermissionOutputTypeDef,
        IpPermissionTypeDef,
        SecurityGroupTypeDef,
        SubnetTypeDef,
    )

    from infra.spec import ClusterSpec

# The description of an SSH rule records where its range came from.
_CALLER, _CHOSEN = "SSH from the caller", "SSH from --ssh-cidr"


# Fields of DescribeInstanceTypes.
_ACCELERATORS = {
    "GpuInfo": "GPUs",
    "NeuronInfo": "Neuron chips",
    "InferenceAcceleratorInfo": "inference chips",
    "FpgaInfo": "FPGAs",
    "MediaAcceleratorInfo": "media chips",
}


@dataclass(frozen=True)
class Network:
    """A subnet and its zone."""

    vpc_id: str
    subnet_id: str
    zone: str

    @staticmethod
    def from_aws(subnet: SubnetTypeDef) -> Network:
        return Network(subnet["VpcId"], subnet["SubnetId"], subnet["AvailabilityZone"])


@dataclass(frozen=True)
class SecurityGroup:
    """A cluster's security group with its current rules.

    ``followed`` holds the ranges of ``ssh_cidrs`` that this tool detected and may replace.
    ``inside_in`` and ``inside_out`` tell whether members may receive and send all internal traffic.
    """

    id: str
    vpc_id: str
    tags: dict[str, str]
    ssh_cidrs: tuple[str, ...] = ()
    followed: frozenset[str] = frozenset()
    inside_in: bool = False
    inside_out: bool = False

    @staticmethod
    def from_aws(group: SecurityGroupTypeDef) -> SecurityGroup:
        ingress, egress = group.get("IpPermissions", []), group.get("IpPermissionsEgress", [])
        # Any other rule belongs to the user and stays.
        ssh = [
            rule
            for rule in ingress
            if (rule.get("IpProtocol"), rule.get("FromPort"), rule.get("ToPort")) == ("tcp", 22, 22)
        ]
        ranges = {
            str(each.get("CidrIp") or each.get("CidrIpv6")): each.get("Description", "")
            for rule in ssh
            for each in (*rule.get("IpRanges", []), *rule.get("Ipv6Ranges", []))
        }
        tracked = [cidr for cidr, why in ranges.items() if why == _CALLER]
        return SecurityGroup(
            id=group["GroupId"],
            vpc_id=group.get("VpcId", ""),
            tags=tags.from_aws(group.get("Tags")),
            ssh_cidrs=tuple(sorted(ranges)),
            followed=frozenset(c for c in tracked if ipaddress.ip_network(c).num_addresses == 1),
            inside_in=_lets_itself_pass(group["GroupId"], ingress),
            inside_out=_lets_itself_pass(group["GroupId"], egress),
        )

    def is_open_as(self, ssh_cidrs: Sequence[str], caller: str) -> bool:
        """Whether all rules are in place and SSH is open to exactly these ranges."""
        same = self.kept_of(ssh_cidrs, caller) == set(ssh_cidrs) == set(self.ssh_cidrs)
        return same and self.inside_in and self.inside_out

    def kept_of(self, ssh_cidrs: Sequence[str], caller: str) -> set[str]:
        """Return the open ranges among ``ssh_cidrs`` whose description is already right."""
        is_open = set(self.ssh_cidrs) & set(ssh_cidrs)
        return {cidr for cidr in is_open if (cidr in self.followed) == (cidr == caller)}

    def admits(self, caller: str) -> bool:
        """Return whether SSH is open to an address."""
        mine = ipaddress.ip_network(caller)
        allowed = map(ipaddress.ip_network, self.ssh_cidrs)
        return any(a.version == mine.version and mine.network_address in a for a in allowed)

    def cidrs_for(self, caller: str) -> tuple[str, ...]:
        """Return the user's ranges, plus the caller's address unless they contain it."""
        kept = tuple(c for c in self.ssh_cidrs if c not in self.followed or c == caller)
        return kept if self.admits(caller) else (*kept, caller)


def _lets_itself_pass(group_id: str, rules: Sequence[IpPermissionOutputTypeDef]) -> bool:
    return any(
        rule.get("IpProtocol") == "-1"
        and group_id in {pair.get("GroupId") for pair in rule.get("UserIdGroupPairs", [])}
        for rule in rules
    )


@dataclass(frozen=True)
class TypeSupport:
    """A region's support for an instance type: zones and features."""

    zones: frozenset[str]
    ena_express: bool = False
    cluster_groups: bool = True
    machine: InstanceType | None = None
    unusable: str = ""
    """Why this tool can't use the type; "" if it can."""


def describe_type_support(ec2: EC2Client, types: Sequence[str]) -> dict[str, TypeSupport]:
    """Return the region's support for instance types; omits types that it does not offer."""
    pages = ec2.get_paginator("describe_instance_type_offerings").paginate(
        LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": list(types)}]
    )
    zones: dict[str, set[str]] = {}
    for page in pages:
        for offering in page["InstanceTypeOfferings"]:
            zones.setdefault(offering["InstanceType"], set()).add(offering["Location"])
    if not zones:
        return {}
    # InstanceTypes=[…] would raise an error for a type that the region lacks; a filter does not.
    infos = ec2.get_paginator("describe_instance_types").paginate(
        Filters=[{"Name": "instance-type", "Values": sorted(zones)}]
    )
    # EC2 may offer a new type before it describes it.
    support: dict[str, TypeSupport] = {}
    for info in (each for page in infos for each in page["InstanceTypes"]):
        name, about = info["InstanceType"], info.get("PlacementGroupInfo", {})
        support[name] = TypeSupport(
            zones=frozenset(zones[name]),
            ena_express=bool(info.get("NetworkInfo", {}).get("EnaSrdSupported", False)),
            cluster_groups="cluster" in about.get("SupportedStrategies", ["cluster"]),
            machine=InstanceType.from_aws(info),
            unusable=_why_unusable(info),
        )
    return support


def _why_unusable(info: Any) -> str:
    architectures = info["ProcessorInfo"].get("SupportedArchitectures", [])
    if "x86_64" not in architectures:
        return f"its processors are {', '.join(architectures)}; this tool is for x86-64"
    found = next((text for key, text in _ACCELERATORS.items() if info.get(key)), "")
    return f"it has {found}, which this tool does not use" if found else ""


def describe_networks(
    ec2: EC2Client, subnet_ids: Sequence[str], vpc_id: str | None
) -> list[Network]:
    """Return the given subnets, else every zone's default subnet; with ``vpc_id``, only that VPC's.

    A default subnet without IPv4 addresses is left out.

    Raises :class:`UsageError` if one does not exist or has no IPv4 addresses, if they are in several VPCs,
    or if their VPC has dedicated tenancy.
    """
    selection: Any = (
        {"SubnetIds": list(subnet_ids)}
        if subnet_ids
        else {"Filters": [{"Name": "default-for-az", "Values": ["true"]}]}
    )
    pages = ec2.get_paginator("describe_subnets").paginate(**selection)
    subnets = unless(
        {"InvalidSubnetID.NotFound", "InvalidSubnetID.Malformed"},
        lambda: [subnet for page in pages for subnet in page["Subnets"]],
    )
    if subnets is None:
        region = ec2.meta.region_name
        raise UsageError(
            f"--subnet-id {','.join(subnet_ids)}: no such subnet in {region}",
            hint=f"`aws ec2 describe-subnets --region {region}` lists them; without --subnet-id, the "
            "default VPC is used",
        )
    without_ipv4 = [subnet["SubnetId"] for subnet in subnets if subnet.get("Ipv6Native")]
    if subnet_ids and without_ipv4:
        raise UsageError(
            f"--subnet-id {','.join(without_ipv4)}: machines there have no IPv4 addresses, which this tool "
            "needs",
            hint="choose a subnet with IPv4 addresses",
        )
    found = [Network.from_aws(subnet) for subnet in subnets if not subnet.get("Ipv6Native")]
    if subnet_ids and len({n.vpc_id for n in found}) > 1:
        places = ", ".join(f"{n.subnet_id} in {n.vpc_id}" for n in found)
        raise UsageError(f"--subnet-id: a cluster is in one VPC; these are in several: {places}")
    # A default VPC has the default tenancy; a cluster that exists can't leave its VPC.
    if subnet_ids and found and vpc_id is None:
        _require_shared_tenancy(ec2, found[0])
    inside = [n for n in found if vpc_id in (None, n.vpc_id)]
    if subnet_ids:
        return sorted(inside, key=lambda n: subnet_ids.index(n.subnet_id))
    return sorted(inside, key=lambda n: n.zone)


def _require_shared_tenancy(ec2: EC2Client, network: Network) -> None:
    """Raise :class:`UsageError` if a VPC's machines would have other prices and need other reservations.

    Without permission to look, allow it. A filter raises no error for another account's VPC.
    """
    vpcs = unless(
        DENIED,
        lambda: ec2.describe_vpcs(Filters=[{"Name": "vpc-id", "Values": [network.vpc_id]}])["Vpcs"],
    )
    if vpcs and vpcs[0].get("InstanceTenancy") == "dedicated":
        raise UsageError(
            f"--subnet-id {network.subnet_id}: {network.vpc_id} has dedicated tenancy, whose prices and "
            "reservations this tool does not support",
            hint="choose a subnet of another VPC",
        )


def require_known(ec2: EC2Client, names: Sequence[str], support: Mapping[str, TypeSupport]) -> None:
    """Raise :class:`UsageError`, with similar names, for a type that the region does not know."""
    unknown = [name for name in names if name not in support and name not in INSTANCE_TYPES]
    if not unknown:
        return
    pages = ec2.get_paginator("describe_instance_type_offerings").paginate()
    offered = [str(o["InstanceType"]) for page in pages for o in page["InstanceTypeOfferings"]]
    near = nearest_type(unknown[0], offered)
    raise UsageError(
        f"unknown instance type {unknown[0]!r} in {ec2.meta.region_name}{near}", hint=WITH_AMX
    )


def require_sold(spec: ClusterSpec, support: Mapping[str, TypeSupport], region: str) -> None:
    """Raise :class:`UsageError` if the region offers none of the types, or if one can't be used."""
    for name, known in support.items():
        if known.unusable:
            raise UsageError(f"{name}: {known.unusable}", hint=WITH_AMX)
        if spec.amx_required and known.machine and known.machine.amx is False:
            raise UsageError(f"{name} has no AMX", hint=f"--allow-no-amx allows it; {WITH_AMX}")
    if not any(known.zones for known in support.values()):
        raise UsageError(
            f"{', '.join(spec.instance_types)}: not offered in {region}",
            hint="use another --region (us-east-1 offers all of them) or another --instance-type",
        )


def require_offers(
    spec: ClusterSpec, support: Mapping[str, TypeSupport], networks: Sequence[Network], region: str
) -> None:
    """Raise :class:`UsageError` if a type can't be used, or no subnet is in a zone with one of the types."""
    require_sold(spec, support, region)
    names = ", ".join(spec.instance_types)
    zones = sorted({zone for known in support.values() for zone in known.zones})
    if not networks:
        raise UsageError(
            f"no default subnet in {region}: the account has no default VPC there",
            hint=f"create one: `aws ec2 create-default-vpc --region {region}`; "
            "or choose a subnet with --subnet-id",
        )
    if not {network.zone for network in networks} & set(zones):
        raise UsageError(
            f"{', '.join(spec.subnet_ids) or 'no default subnet'}: not in a zone that offers {names} "
            f"({', '.join(zones)})",
            hint="choose a subnet in one of these zones with --subnet-id, "
            f"or create a default VPC: `aws ec2 create-default-vpc --region {region}`",
        )


def create_security_group(
    ec2: EC2Client, cluster: str, vpc_id: str, labels: Mapping[str, str]
) -> SecurityGroup:
    """Create a group without rules. ``labels`` are the cluster's record."""
    known = tags.resource_tags(cluster, "group", **labels)
    group_id = ec2.create_security_group(
        GroupName=tags.resource_name(cluster),
        Description=f"spr-cluster {cluster}: SSH from its owner, all traffic inside",
        VpcId=vpc_id,
        TagSpecifications=tags.tag_specifications(["security-group"], known),
    )["GroupId"]
    return SecurityGroup(group_id, vpc_id, known)


def open_security_group(
    ec2: EC2Client, group: SecurityGroup, ssh_cidrs: Sequence[str], caller: str = ""
) -> None:
    """Add the missing rules and close SSH to all other addresses.

    ``caller`` is the range in ``ssh_cidrs`` that tracks this machine's address.
    """
    kept = group.kept_of(ssh_cidrs, caller)
    inside: IpPermissionTypeDef = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group.id}]}
    # Omit the description: AWS revokes nothing if it differs, and without one, any matches.
    # https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_RevokeSecurityGroupIngress.html
    stale = [_ssh_rule(cidr) for cidr in group.ssh_cidrs if cidr not in kept]
    _change(ec2.revoke_security_group_ingress, group.id, stale)
    missing = [
        _ssh_rule(cidr, Description=_CALLER if cidr == caller else _CHOSEN)
        for cidr in ssh_cidrs
        if cidr not in kept
    ]
    missing += [] if group.inside_in else [inside]
    _change(partial(when_visible, ec2.authorize_security_group_ingress), group.id, missing)
    if not group.inside_out:
        # EFA does not count the default "everything out" rule: https://github.com/open-mpi/ompi/issues/6795
        _change(ec2.authorize_security_group_egress, group.id, [inside])


def _change(
    call: Callable[..., object], group_id: str, rules: Sequence[IpPermissionTypeDef]
) -> None:
    """Add or remove rules in one call; if another command did part of it, one by one."""
    if not rules:
        return
    try:
        call(GroupId=group_id, IpPermissions=list(rules))
    except ClientError as error:
        if error_code(error) not in ("InvalidPermission.Duplicate", "InvalidPermission.NotFound"):
            raise
        for rule in rules if len(rules) > 1 else ():
            _change(call, group_id, [rule])


def _ssh_rule(cidr: str, **described: str) -> Any:
    kind, key = ("Ipv6Ranges", "CidrIpv6") if ":" in cidr else ("IpRanges", "CidrIp")
    ports = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22}
    return {**ports, kind: [{key: cidr, **described}]}


def create_placement_group(ec2: EC2Client, cluster: str, labels: Mapping[str, str]) -> None:
    """Create a placement group: machines are close together, and a TCP flow gets 10 Gbit/s."""
    ec2.create_placement_group(
        GroupName=tags.resource_name(cluster),
        Strategy="cluster",
        TagSpecifications=tags.tag_specifications(
            ["placement-group"], tags.resource_tags(cluster, "placement", **labels)
        ),
    )
