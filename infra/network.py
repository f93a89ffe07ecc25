"""Where a cluster's machines stand: the zone and subnet, and the security group around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from infra import tags
from infra.clients import when_visible
from infra.errors import UsageError

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client
    from types_boto3_ec2.type_defs import IpPermissionTypeDef, SubnetTypeDef

    from infra.spec import ClusterSpec


@dataclass(frozen=True)
class Network:
    """One subnet, in a zone that offers the machine type."""

    vpc_id: str
    subnet_id: str
    zone: str

    @staticmethod
    def from_aws(subnet: SubnetTypeDef) -> Network:
        return Network(subnet["VpcId"], subnet["SubnetId"], subnet["AvailabilityZone"])


def describe_offering_zones(ec2: EC2Client, instance_type: str) -> frozenset[str]:
    """The region's zones that offer an instance type."""
    pages = ec2.get_paginator("describe_instance_type_offerings").paginate(
        LocationType="availability-zone",
        Filters=[{"Name": "instance-type", "Values": [instance_type]}],
    )
    return frozenset(o["Location"] for page in pages for o in page["InstanceTypeOfferings"])


def choose_network(ec2: EC2Client, spec: ClusterSpec) -> Network:
    """The wished subnet, else a default one in the first zone that offers the type.

    Raises :class:`UsageError` where the region or the wished subnet's zone does not offer it.
    """
    zones = describe_offering_zones(ec2, spec.instance_type)
    if not zones:
        raise UsageError(
            f"{spec.instance_type} is not offered in {ec2.meta.region_name}",
            hint="another --region (us-east-1 has all of them) or another --instance-type",
        )
    wish: Any = (
        {"SubnetIds": [spec.subnet_id]}
        if spec.subnet_id
        else {"Filters": [{"Name": "default-for-az", "Values": ["true"]}]}
    )
    subnets = ec2.describe_subnets(**wish)["Subnets"]
    fitting = sorted((Network.from_aws(s) for s in subnets), key=lambda n: n.zone)
    fitting = [network for network in fitting if network.zone in zones]
    if not fitting:
        where = spec.subnet_id or "no default subnet"
        raise UsageError(
            f"{where}: not in a zone that offers {spec.instance_type} ({', '.join(sorted(zones))})",
            hint="name a subnet in one of these zones with --subnet-id, "
            "or create a default VPC: `aws ec2 create-default-vpc`",
        )
    return fitting[0]


def create_security_group(ec2: EC2Client, spec: ClusterSpec, network: Network) -> str:
    """A group that lets SSH in from the caller alone and everything pass among its members."""
    name = f"spr-cluster-{spec.name}"
    group_id = ec2.create_security_group(
        GroupName=name,
        Description=f"spr-cluster {spec.name}: SSH from {spec.ssh_cidr}, all traffic inside",
        VpcId=network.vpc_id,
        TagSpecifications=tags.tag_specifications(
            ["security-group"], tags.resource_tags(spec.name, "group")
        ),
    )["GroupId"]
    inside: IpPermissionTypeDef = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group_id}]}
    ssh: IpPermissionTypeDef = {
        "IpProtocol": "tcp",
        "FromPort": 22,
        "ToPort": 22,
        "IpRanges": [{"CidrIp": spec.ssh_cidr, "Description": "SSH from the caller"}],
    }
    when_visible(
        ec2.authorize_security_group_ingress, GroupId=group_id, IpPermissions=[ssh, inside]
    )
    # EFA does not count the default "everything out" rule: https://github.com/open-mpi/ompi/issues/6795
    ec2.authorize_security_group_egress(GroupId=group_id, IpPermissions=[inside])
    return group_id
