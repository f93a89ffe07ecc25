"""The permissions that AWS checks for a call: actions on resources, each with its condition keys.

Resources and keys by action: https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonec2.html
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moto.iam.models import iam_backends

from infra.local.api.policy import Request
from infra.local.api.requests import ApiCall

Context = dict[str, str | tuple[str, ...]]

# Resource kinds by the prefix of their ids; DescribeTags uses the same names.
_KINDS = {
    "ami": "image",
    "cr": "capacity-reservation",
    "eni": "network-interface",
    "i": "instance",
    "key": "key-pair",
    "pg": "placement-group",
    "sg": "security-group",
    "sir": "spot-instances-request",
    "snap": "snapshot",
    "subnet": "subnet",
    "vol": "volume",
    "vpc": "vpc",
}
_OF_NO_ACCOUNT = ("image", "snapshot")
# The parameters that refer to existing resources.
_EXISTING = {
    "AuthorizeSecurityGroupEgress": {"GroupId": "security-group"},
    "AuthorizeSecurityGroupIngress": {"GroupId": "security-group"},
    "CancelSpotInstanceRequests": {"SpotInstanceRequestId": "spot-instances-request"},
    "CreateImage": {"InstanceId": "instance"},
    "CreateSecurityGroup": {"VpcId": "vpc"},
    "CreateTags": {"ResourceId": ""},
    "DeleteKeyPair": {"KeyPairId": "key-pair", "KeyName": "key-pair"},
    "DeleteNetworkInterface": {"NetworkInterfaceId": "network-interface"},
    "DeletePlacementGroup": {"GroupName": "placement-group"},
    "DeleteSecurityGroup": {"GroupId": "security-group"},
    "DeleteSnapshot": {"SnapshotId": "snapshot"},
    "DeleteVolume": {"VolumeId": "volume"},
    "DeregisterImage": {"ImageId": "image"},
    "GetConsoleOutput": {"InstanceId": "instance"},
    "RevokeSecurityGroupIngress": {"GroupId": "security-group"},
    "StartInstances": {"InstanceId": "instance"},
    "StopInstances": {"InstanceId": "instance"},
    "TerminateInstances": {"InstanceId": "instance"},
    # Groups come last, because a denial for any other resource is more informative.
    "RunInstances": {
        r"CapacityReservationSpecification\..*\.CapacityReservationId": "capacity-reservation",
        "ImageId": "image",
        r"BlockDeviceMapping\.\d+\.Ebs\.SnapshotId": "snapshot",
        "SubnetId": "subnet",
        r"NetworkInterface\.\d+\.SubnetId": "subnet",
        "KeyName": "key-pair",
        r"Placement\.GroupName": "placement-group",
        "SecurityGroupId": "security-group",
        r"NetworkInterface\.\d+\.SecurityGroupId": "security-group",
    },
}
# The kinds that a call creates, with the parameter for the name if it is part of the ARN.
_CREATED = {
    "CreateImage": {"image": "", "snapshot": ""},
    "CreateKeyPair": {"key-pair": "KeyName"},
    "CreateNetworkInterface": {"network-interface": ""},
    "CreatePlacementGroup": {"placement-group": "GroupName"},
    "CreateSecurityGroup": {"security-group": ""},
    "CreateVolume": {"volume": ""},
    "ImportKeyPair": {"key-pair": "KeyName"},
    "RunInstances": {"instance": "", "volume": "", "network-interface": ""},
}
_TAG = re.compile(r"TagSpecification\.(\d+)\.(ResourceType|Tag\.\d+\.(?:Key|Value))")
# https://docs.aws.amazon.com/ebs/latest/userguide/ebs-encryption-requirements.html
_KMS = ("Decrypt", "DescribeKey", "GenerateDataKeyWithoutPlaintext", "ReEncryptFrom", "ReEncryptTo")
SPOT_SERVICE = "spot.amazonaws.com"


def requests_of(call: ApiCall, ec2: Any, tag_delay_s: float) -> Iterator[Request]:
    """Yield the requests that AWS authorizes for a call. Ignores tags younger than ``tag_delay_s``."""
    if call.service == "ec2":
        asked = Ec2Call(call.action, call.parameters, ec2, tag_delay_s)
        yield from asked.requests()
        return
    region, account = ec2.region_name, ec2.account_id
    if call.service == "iam":
        yield from iam_requests(call, account, call.parameters)
        return
    if call.service == "scheduler":
        yield from scheduler_requests(call, account)
        return
    resource = "*"
    body = call.body.decode("utf-8", "replace")
    if call.action == "GetParameter" and (name := re.search(r'"Name":\s*"/?([^"]*)"', body)):
        # Public parameters belong to no account:
        # https://docs.aws.amazon.com/systems-manager/latest/userguide/parameter-store-finding-public-parameters.html
        owner = "" if name[1].startswith("aws/") else account
        resource = f"arn:aws:ssm:{region}:{owner}:parameter/{name[1]}"
    elif call.action == "GetServiceSetting" and (
        id_ := re.search(r'"SettingId":\s*"([^"]*)"', body)
    ):
        resource = f"arn:aws:ssm:{region}:{account}:servicesetting{id_[1]}"
    elif call.action == "GetServiceQuota":
        parts = [re.search(rf'"{key}":\s*"([^"]*)"', body) for key in ("ServiceCode", "QuotaCode")]
        quota = "/".join(part[1] for part in parts if part)
        resource = f"arn:aws:servicequotas:{region}:{account}:{quota}"
    yield Request(f"{call.service}:{call.action}", resource, {"aws:PrincipalAccount": account})


def key_requests(ec2: Any, key: str) -> tuple[Request, ...]:
    """Return the requests on the key that a new encrypted disk requires."""
    via: Context = {"kms:ViaService": f"ec2.{ec2.region_name}.amazonaws.com"}
    grant = Request("kms:CreateGrant", key, {**via, "kms:GrantIsForAWSResource": "true"})
    return (grant, *(Request(f"kms:{action}", key, via) for action in _KMS))


def role_request(ec2: Any) -> Request:
    """Return the extra request that an account's first spot purchase requires.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/service-linked-roles-spot-instance-requests.html
    """
    role = f"aws-service-role/{SPOT_SERVICE}/AWSServiceRoleForEC2Spot"
    arn = f"arn:aws:iam::{ec2.account_id}:role/{role}"
    return Request("iam:CreateServiceLinkedRole", arn, {"iam:AWSServiceName": SPOT_SERVICE})


@dataclass(frozen=True)
class Ec2Call:
    """A call to EC2 and the state that its authorization depends on."""

    action: str
    given: Mapping[str, str]
    ec2: Any
    tag_delay_s: float

    def requests(self) -> Iterator[Request]:
        if self.action not in _EXISTING and self.action not in _CREATED:
            yield self._request(self.action, "*", {})
            return
        tags = self._requested_tags()
        created = dict(_CREATED.get(self.action, {}))
        # EC2 does not check an untagged spot request:
        # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ExamplePolicies_EC2.html#iam-example-spot-instances-run
        if self.action == "RunInstances" and "spot-instances-request" in tags:
            created["spot-instances-request"] = ""
        for kind, name in created.items():
            keys = {**self._of_new(kind), **keys_of_tags(tags.get(kind, {}))}
            yield self._request(self.action, self._arn(kind, self.given.get(name, "*")), keys)
        for kind, asked in tags.items():
            keys = {**keys_of_tags(asked), "ec2:CreateAction": self.action}
            name = created.get(kind, "")
            yield self._request("CreateTags", self._arn(kind, self.given.get(name, "*")), keys)
        yield from self._existing()
        if self.action == "RunInstances" and (
            profile_name := self.given.get("IamInstanceProfile.Name")
        ):
            profile = iam_backends[self.ec2.account_id]["aws"].instance_profiles.get(profile_name)
            for role in profile.roles if profile else ():
                yield pass_to_ec2(role.arn, self.ec2.account_id)
        if self.action == "RunInstances" and not any("SecurityGroup" in key for key in self.given):
            # EC2 uses the VPC's default group, which has no tags.
            yield self._request(self.action, self._arn("security-group", "sg-default"), {})

    def _request(self, action: str, resource: str, keys: Mapping[str, Any]) -> Request:
        always = {"aws:PrincipalAccount": self.ec2.account_id, "ec2:Region": self.ec2.region_name}
        return Request(f"ec2:{action}", resource, {**always, **keys})

    def _arn(self, kind: str, id_: str) -> str:
        account = "" if kind in _OF_NO_ACCOUNT else self.ec2.account_id
        return f"arn:aws:ec2:{self.ec2.region_name}:{account}:{kind}/{id_}"

    def _requested_tags(self) -> dict[str, dict[str, str]]:
        """Return the tags of the resources that the call creates, by kind."""
        found: dict[str, dict[str, str]] = {}
        for key, value in self.given.items():
            if (match := _TAG.fullmatch(key)) and match[2].endswith("Key"):
                kind = self.given[f"TagSpecification.{match[1]}.ResourceType"]
                tag_value = self.given.get(f"{key.removesuffix('Key')}Value", "")
                found.setdefault(kind, {})[value] = tag_value
        return found

    def _of_new(self, kind: str) -> Context:
        if self.action == "RunInstances" and kind == "instance":
            market = self.given.get("InstanceMarketOptions.MarketType", "on-demand")
            tokens = self.given.get("MetadataOptions.HttpTokens", "optional")
            return {
                "ec2:InstanceType": self.given.get("InstanceType", ""),
                "ec2:MetadataHttpTokens": tokens,
                "ec2:InstanceMarketType": market,
            }
        if kind == "volume":
            asked = [v for k, v in self.given.items() if k.endswith("Encrypted")]
            return {"ec2:Encrypted": str(bool(asked) and set(asked) == {"true"}).lower()}
        return {}

    def _existing(self) -> Iterator[Request]:
        for parameter, kind in _EXISTING.get(self.action, {}).items():
            for key, id_ in self.given.items():
                if re.fullmatch(rf"{parameter}(\.\d+)?", key):
                    yield self._of_existing(kind or _KINDS.get(id_.partition("-")[0], ""), id_)

    def _of_existing(self, kind: str, given: str) -> Request:
        id_, name = self._find(kind, given)
        created = self.ec2.visibility.created_at.get(id_)
        is_new = created is not None and self.ec2.runtime.now() - created < self.tag_delay_s
        # A resource that does not exist has no tags.
        tags = {} if is_new else self.ec2.tags.get(id_, {})
        keys: Context = {f"aws:ResourceTag/{key}": value for key, value in tags.items()}
        if self.action == "CreateTags":
            asked = {
                value: self.given.get(f"{key.removesuffix('Key')}Value", "")
                for key, value in self.given.items()
                if re.fullmatch(r"Tag\.\d+\.Key", key)
            }
            keys |= keys_of_tags(asked)
        if kind == "image" and (image := self.ec2.amis.get(id_)):
            keys["ec2:Owner"] = image.owner_id
        return self._request(self.action, self._arn(kind, name), keys)

    def _find(self, kind: str, given: str) -> tuple[str, str]:
        """Return a resource's id and the end of its ARN, which for two kinds is the name."""
        listed: Callable[[], Any] = {
            "key-pair": lambda: self.ec2.key_pairs.items(),
            "placement-group": lambda: self.ec2.placement_groups.by_name.items(),
        }.get(kind, dict[str, Any]().items)
        for name, resource in listed():
            if given in (name, resource.id):
                return resource.id, name
        return given, given


def iam_requests(call: ApiCall, account: str, given: Mapping[str, str]) -> Iterator[Request]:
    """Yield the requests that IAM authorizes for a call with these parameters."""
    iam = iam_backends[account]["aws"]
    role, boundary = "*", given.get("PermissionsBoundary")
    if "RoleName" in given:
        known = next((r for r in iam.roles.values() if r.name == given["RoleName"]), None)
        path = known.path if known else given.get("Path", "/")
        role = f"arn:aws:iam::{account}:role{path}{given['RoleName']}"
        if known and call.action in _BOUNDED:
            boundary = known.permissions_boundary_arn
    resource = role
    if call.action == "ListInstanceProfiles":
        resource = f"arn:aws:iam::{account}:instance-profile{given.get('PathPrefix', '/')}"
    elif name := given.get("InstanceProfileName"):
        profile = iam.instance_profiles.get(name)
        where = profile.path if profile else given.get("Path", "/")
        resource = f"arn:aws:iam::{account}:instance-profile{where}{name}"
    tags = {
        value: given.get(f"{key.removesuffix('Key')}Value", "")
        for key, value in given.items()
        if re.fullmatch(r"Tags\.member\.\d+\.Key", key)
    }
    keys = {"aws:PrincipalAccount": account, **keys_of_tags(tags)}
    bounded = {"iam:PermissionsBoundary": boundary} if boundary else {}
    yield Request(f"iam:{call.action}", resource, {**keys, **bounded})
    if call.action in _TAGGED and tags:
        yield Request(_TAGGED[call.action], resource, keys)
    if call.action == "AddRoleToInstanceProfile":
        yield pass_to_ec2(role, account)


# https://docs.aws.amazon.com/IAM/latest/UserGuide/access_policies_boundaries.html
_BOUNDED = {"PutRolePolicy", "DeleteRolePolicy", "AttachRolePolicy", "DetachRolePolicy"}
_TAGGED = {"CreateRole": "iam:TagRole", "CreateInstanceProfile": "iam:TagInstanceProfile"}


def pass_to_ec2(role: str, account: str) -> Request:
    """Return the request that passes a role to EC2."""
    keys: Context = {"aws:PrincipalAccount": account, "iam:PassedToService": "ec2.amazonaws.com"}
    return Request("iam:PassRole", role, keys)


def scheduler_requests(call: ApiCall, account: str) -> Iterator[Request]:
    """Yield the requests that EventBridge Scheduler authorizes. List actions have no resource."""
    given = json.loads(call.body or b"{}")
    kind, _, name = call.path.strip("/").partition("/")
    here = f"arn:aws:scheduler:{call.region}:{account}"
    resource = {
        "schedule-groups": f"{here}:schedule-group/{name}",
        "schedules": f"{here}:schedule/{given.get('GroupName', 'default')}/{name}",
        "tags": name,
    }.get(kind, "*")
    always = {"aws:PrincipalAccount": account}
    tags = {tag["Key"]: tag["Value"] for tag in given.get("Tags", ())}
    keys = {**always, **keys_of_tags(tags)}
    yield Request(f"scheduler:{call.action}", resource if name else "*", keys)
    if call.action == "CreateScheduleGroup" and tags:
        yield Request("scheduler:TagResource", resource, keys)
    elif call.action == "DeleteScheduleGroup":
        yield Request("scheduler:DeleteSchedule", f"{here}:schedule/{name}/*", always)
    elif role := given.get("Target", {}).get("RoleArn"):
        passed = {**always, "iam:PassedToService": "scheduler.amazonaws.com"}
        yield Request("iam:PassRole", role, passed)


def keys_of_tags(tags: Mapping[str, str]) -> Context:
    """Return the condition keys for the tags in a call."""
    keys: Context = {f"aws:RequestTag/{key}": value for key, value in tags.items()}
    return {**keys, "aws:TagKeys": tuple(tags)} if tags else keys
