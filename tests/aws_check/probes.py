"""The calls that are made in both clouds: the same mistakes, and dry runs of all that changes something.

Without ``--spend``, every call only reads or has ``DryRun``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from infra.cost.quotas import ON_DEMAND_QUOTA, SPOT_QUOTA
from infra.ec2.images import ubuntu_parameter
from infra.ec2.tags import CLUSTER, resource_name
from tests.aws_check.sides import Side

Parameters = Callable[[Side], dict[str, Any]]
TYPE = "c7i.large"
_NONE = "0123456789abcdef0"
_KEY = b"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEw6QxQ2Yp0W9uWhKkfm9B5pZ1cYb5eDyYk3p3q1cG7k aws-check"
_NOWHERE = [{"CidrIp": "192.0.2.1/32"}]
_RULE = [{"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": _NOWHERE}]


@dataclass(frozen=True)
class Probe:
    """One call: ``operation`` is boto3's name, and ``why`` says what depends on the answer."""

    name: str
    why: str
    service: str
    operation: str
    parameters: Parameters


def _fixed(**parameters: Any) -> Parameters:
    return lambda _: parameters


def _read(name: str, why: str, operation: str, service: str = "ec2", **parameters: Any) -> Probe:
    return Probe(name, why, service, operation, _fixed(**parameters))


def _filter(name: str, value: str) -> list[dict[str, Any]]:
    return [{"Name": name, "Values": [value]}]


_GONE = "the product takes this code to mean that a resource is gone or not visible yet"
_PAGES = "the product follows NextToken, the answer's element"
_FILTER = "a filter must not fail for what does not exist"
READS = (
    _read("unknown instance", _GONE, "describe_instances", InstanceIds=[f"i-{_NONE}"]),
    _read("malformed instance id", _GONE, "describe_instances", InstanceIds=["i-x"]),
    _read("instance filter", _FILTER, "describe_instances", Filters=_filter("instance-id", f"i-{_NONE}")),
    _read("unknown subnet", "--subnet-id names it", "describe_subnets", SubnetIds=[f"subnet-{_NONE}"]),
    _read("malformed subnet id", "--subnet-id names it", "describe_subnets", SubnetIds=["subnet-x"]),
    _read("unknown security group", _GONE, "describe_security_groups", GroupIds=[f"sg-{_NONE}"]),
    _read("unknown key pair", _GONE, "describe_key_pairs", KeyNames=["spr-cluster-none"]),
    _read("unknown placement group", _GONE, "describe_placement_groups", GroupNames=["spr-cluster-none"]),
    _read("unknown image", _GONE, "describe_images", ImageIds=[f"ami-{_NONE}"]),
    _read("unknown snapshot", _GONE, "describe_snapshots", SnapshotIds=[f"snap-{_NONE}"]),
    _read("unknown volume", _GONE, "describe_volumes", VolumeIds=[f"vol-{_NONE}"]),
    _read("unknown interface", _GONE, "describe_network_interfaces", NetworkInterfaceIds=[f"eni-{_NONE}"]),
    _read("unknown spot request", _GONE, "describe_spot_instance_requests",
          SpotInstanceRequestIds=[f"sir-{_NONE[:8]}"]),
    _read("unknown instance type", "a type of another region", "describe_instance_types",
          InstanceTypes=["c9x.xlarge"]),
    _read("type filter", _FILTER, "describe_instance_types", Filters=_filter("instance-type", "c9x.xlarge")),
    _read("offering filter", _FILTER, "describe_instance_type_offerings",
          Filters=_filter("instance-type", "c9x.xlarge")),
    _read("first page of types", _PAGES, "describe_instance_types", MaxResults=5),
    _read("first page of offerings", _PAGES, "describe_instance_type_offerings", MaxResults=5),
    _read("status of an unknown instance", _GONE, "describe_instance_status", InstanceIds=[f"i-{_NONE}"]),
    _read("console of an unknown instance", "host keys are read there", "get_console_output",
          InstanceId=f"i-{_NONE}"),
    _read("console, latest", "host keys are read there", "get_console_output", InstanceId=f"i-{_NONE}",
          Latest=True),
    _read("unknown parameter", "no image of a release", "get_parameter", "ssm", Name="/aws/service/none"),
    *(_read(f"image of Ubuntu {release}", "nodes start from it", "get_parameter", "ssm",
            Name=ubuntu_parameter(release)) for release in ("20.04", "22.04", "24.04")),
    _read("on-demand quota", "`up --dry-run` shows it", "get_service_quota", "service-quotas",
          ServiceCode="ec2", QuotaCode=ON_DEMAND_QUOTA),
    _read("spot quota", "`up --dry-run` shows it", "get_service_quota", "service-quotas",
          ServiceCode="ec2", QuotaCode=SPOT_QUOTA),
    _read("unknown quota", "`up --dry-run` shows it", "get_service_quota", "service-quotas",
          ServiceCode="ec2", QuotaCode="L-00000000"),
)  # fmt: skip


def _dry(name: str, operation: str, parameters: Parameters, why: str = "") -> Probe:
    why = why or "DryRun must be honored, and check what the call names"
    return Probe(
        f"dry run: {name}", why, "ec2", operation, lambda s: parameters(s) | {"DryRun": True}
    )


def _launch(side: Side, **changes: Any) -> dict[str, Any]:
    subnet = changes.pop("SubnetId", "") or side.subnet["SubnetId"]
    image = changes.pop("ImageId", "") or side.image_id
    one: dict[str, Any] = {"InstanceType": TYPE, "MinCount": 1, "MaxCount": 1}
    return {"ImageId": image, "SubnetId": subnet} | one | changes


_MISTAKE = "`up` explains the refusal of a launch by its code"
DRY_RUNS = (
    _dry("a launch", "run_instances", _launch),
    _dry("a launch, bad type", "run_instances", lambda s: _launch(s, InstanceType="c9x.xlarge"), _MISTAKE),
    _dry("a launch, unknown image", "run_instances", lambda s: _launch(s, ImageId=f"ami-{_NONE}"), _MISTAKE),
    _dry("a launch, unknown subnet", "run_instances",
         lambda s: _launch(s, SubnetId=f"subnet-{_NONE}"), _MISTAKE),
    _dry("a launch, unknown key", "run_instances", lambda s: _launch(s, KeyName="spr-none"), _MISTAKE),
    _dry("a launch, unknown group", "run_instances",
         lambda s: _launch(s, SecurityGroupIds=[f"sg-{_NONE}"]), _MISTAKE),
    _dry("a launch, unknown placement group", "run_instances",
         lambda s: _launch(s, Placement={"GroupName": "spr-none"}), _MISTAKE),
    _dry("a spot launch", "run_instances",
         lambda s: _launch(s, InstanceMarketOptions={"MarketType": "spot"}), _MISTAKE),
    _dry("security group", "create_security_group",
         lambda s: {"GroupName": "spr-none", "Description": "aws-check", "VpcId": s.subnet["VpcId"]}),
    _dry("placement group", "create_placement_group",
         _fixed(GroupName="spr-none", Strategy="cluster")),
    _dry("key pair", "import_key_pair", _fixed(KeyName="spr-none", PublicKeyMaterial=_KEY)),
    _dry("a broken key pair", "import_key_pair", _fixed(KeyName="spr-none", PublicKeyMaterial=b"none")),
    _dry("image", "create_image", _fixed(InstanceId=f"i-{_NONE}", Name="spr-none")),
    _dry("tags", "create_tags", _fixed(Resources=[f"i-{_NONE}"], Tags=[{"Key": "a", "Value": "b"}])),
    _dry("ingress", "authorize_security_group_ingress",
         lambda s: {"GroupId": s.group_id, "IpPermissions": _RULE}),
    _dry("egress", "authorize_security_group_egress",
         lambda s: {"GroupId": s.group_id, "IpPermissions": _RULE}),
    _dry("revocation of no rule", "revoke_security_group_ingress",
         lambda s: {"GroupId": s.group_id, "IpPermissions": _RULE}),
    _dry("termination", "terminate_instances", _fixed(InstanceIds=[f"i-{_NONE}"])),
    _dry("spot request", "cancel_spot_instance_requests",
         _fixed(SpotInstanceRequestIds=[f"sir-{_NONE[:8]}"])),
    _dry("key pair that is gone", "delete_key_pair", _fixed(KeyPairId=f"key-{_NONE}")),
    _dry("interface that is gone", "delete_network_interface",
         _fixed(NetworkInterfaceId=f"eni-{_NONE}")),
    _dry("placement group that is gone", "delete_placement_group", _fixed(GroupName="spr-none")),
    _dry("security group that is gone", "delete_security_group", _fixed(GroupId=f"sg-{_NONE}")),
    _dry("snapshot that is gone", "delete_snapshot", _fixed(SnapshotId=f"snap-{_NONE}")),
    _dry("volume that is gone", "delete_volume", _fixed(VolumeId=f"vol-{_NONE}")),
    _dry("image that is gone", "deregister_image", _fixed(ImageId=f"ami-{_NONE}")),
)  # fmt: skip


def on_a_cluster(cluster: str) -> tuple[Probe, ...]:
    """Calls about a cluster that exists, all refused or without a cost. Only with ``--spend``."""
    name = resource_name(cluster)
    labels = [{"ResourceType": "placement-group", "Tags": [{"Key": CLUSTER, "Value": cluster}]}]
    again = "a second `up` meets it"

    def probe(title: str, why: str, operation: str, parameters: Parameters) -> Probe:
        return Probe(f"alive: {title}", why, "ec2", operation, parameters)

    def group_of(side: Side) -> str:
        return str(side.machine_of(cluster)["SecurityGroups"][0]["GroupId"])

    def id_of(side: Side) -> str:
        return str(side.machine_of(cluster)["InstanceId"])

    def inside(side: Side) -> dict[str, Any]:
        group = group_of(side)
        rule = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}
        return {"GroupId": group, "IpPermissions": [rule]}

    return (
        probe("console, latest", "not all types have it", "get_console_output",
              lambda s: {"InstanceId": id_of(s), "Latest": True}),
        probe("console", "host keys are read there", "get_console_output",
              lambda s: {"InstanceId": id_of(s)}),
        probe("status", "a bad machine is recognized by it", "describe_instance_status",
              lambda s: {"InstanceIds": [id_of(s)]}),
        probe("a rule twice", again, "authorize_security_group_ingress", inside),
        probe("a security group twice", again, "create_security_group",
              lambda s: {"GroupName": name, "Description": "aws-check", "VpcId": s.subnet["VpcId"]}),
        probe("a security group in use", "`down` tries again", "delete_security_group",
              lambda s: {"GroupId": group_of(s)}),
        probe("a key pair twice", again, "import_key_pair",
              _fixed(KeyName=name, PublicKeyMaterial=_KEY)),
        probe("a placement group", again, "create_placement_group",
              _fixed(GroupName=name, Strategy="cluster", TagSpecifications=labels)),
        probe("a placement group twice", again, "create_placement_group",
              _fixed(GroupName=name, Strategy="cluster", TagSpecifications=labels)),
        probe("tags of nothing", _GONE, "create_tags",
              _fixed(Resources=[f"i-{_NONE}"], Tags=[{"Key": "a", "Value": "b"}])),
        probe("one of two unknown", "one unknown id fails the call", "describe_instances",
              lambda s: {"InstanceIds": [id_of(s), f"i-{_NONE}"]}),
        probe("the rules of nothing", _GONE, "authorize_security_group_ingress",
              _fixed(GroupId=f"sg-{_NONE}", IpPermissions=_RULE)),
    )  # fmt: skip
