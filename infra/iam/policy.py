"""The least-privilege IAM policy for all commands.

The tests run a cluster's whole life cycle under exactly this policy and check what it must deny. Resources
and condition keys by action: https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonec2.html
The policy omits ``sts:GetCallerIdentity``, which AWS allows to every caller, even one with a denial:
https://docs.aws.amazon.com/STS/latest/APIReference/API_GetCallerIdentity.html
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from infra.ec2 import tags
from infra.ec2.images import CANONICAL
from infra.ec2.routes import HOST_MANAGEMENT
from infra.errors import UsageError
from infra.iam.instance_profile import allow_key, allow_prefix
from infra.instance_types import BAKERS, INSTANCE_TYPES, check_type_name, complete_type_name
from infra.s3_url import S3Location
from infra.spec import EICE, KMS_KEY, SSM

# Not all virtual sizes: IAM limits a policy's length.
_VIRTUAL = ("r7iz.16xlarge", "c7i.16xlarge", "c7i.24xlarge", "m7i.16xlarge", "c7i.large", *BAKERS)
DEFAULT_TYPES = tuple(t.name for t in INSTANCE_TYPES.values() if t.is_metal or t.name in _VIRTUAL)

# Purchases work without these permissions, only with fewer checks and less information.
_INFORM = (
    "ec2:DescribeCapacityReservations",
    "ec2:DescribeInstanceConnectEndpoints",
    "ec2:DescribeNetworkAcls",
    "ec2:DescribeRouteTables",
    "ec2:DescribeSpotPriceHistory",
    "ec2:DescribeVpcBlockPublicAccessExclusions",
    "ec2:DescribeVpcBlockPublicAccessOptions",
    "ec2:DescribeVpcEndpoints",
    "ec2:DescribeVpcs",
    # For `doctor`, and to explain why the account does not see Ubuntu's image.
    "ec2:GetAllowedImagesSettings",
    "ec2:GetEbsDefaultKmsKeyId",
    "organizations:DescribeEffectivePolicy",
    "pricing:GetProducts",
    "servicequotas:GetServiceQuota",
)
# Actions and reads that AWS can't restrict to a resource.
_LOOK = (
    *_INFORM,
    "ec2:DescribeImages",
    "ec2:DescribeInstanceStatus",
    "ec2:DescribeInstanceTypeOfferings",
    "ec2:DescribeInstanceTypes",
    "ec2:DescribeInstances",
    "ec2:DescribeKeyPairs",
    "ec2:DescribeNetworkInterfaces",
    "ec2:DescribePlacementGroups",
    "ec2:DescribeRegions",
    "ec2:DescribeSecurityGroups",
    "ec2:DescribeSnapshots",
    "ec2:DescribeSpotInstanceRequests",
    "ec2:DescribeSubnets",
    "ec2:DescribeVolumes",
)
OPTIONAL = frozenset(
    {
        *_INFORM,
        "ec2:GetConsoleOutput",
        "s3:GetBucketVersioning",
        "s3:GetLifecycleConfiguration",
        "ssm:GetServiceSetting",
        "ssm:ResumeSession",
    }
)
# Images and snapshots have no account in their ARNs.
_IMAGES = "arn:*:ec2:*::image/*"
_RUN = ("ec2:RunInstances",)
# In any network: the user chooses it.
_INSIDE = ("ec2:CreateSecurityGroup", *_RUN)
# Every creating call also tags the new resource; the tag is the condition.
_MAKE = (
    "ec2:CreateImage",
    "ec2:CreatePlacementGroup",
    "ec2:CreateSecurityGroup",
    "ec2:ImportKeyPair",
)
# Permission to tag any resource would imply permission to delete it, so allow only new and own resources.
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/supported-iam-actions-tagging.html
_TAG = ("ec2:CreateTags",)
_USE_OUR_OWN = (
    "ec2:AuthorizeSecurityGroupEgress",
    "ec2:AuthorizeSecurityGroupIngress",
    "ec2:CancelSpotInstanceRequests",
    # CreateImage of our own machines; RunInstances in our own groups, from our own images.
    "ec2:CreateImage",
    *_TAG,
    "ec2:DeleteKeyPair",
    "ec2:DeleteNetworkInterface",
    "ec2:DeletePlacementGroup",
    "ec2:DeleteSecurityGroup",
    "ec2:DeleteSnapshot",
    "ec2:DeleteVolume",
    "ec2:DeregisterImage",
    "ec2:GetConsoleOutput",
    "ec2:RevokeSecurityGroupIngress",
    *_RUN,
    "ec2:TerminateInstances",
)
# Canonical's accounts. Its images also have the alias "amazon", as a verified provider's:
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/sharing-amis.html
_UBUNTU_OWNERS = [*CANONICAL.values(), "amazon"]
# The first spot purchase in an account makes EC2 create its role with the caller's permissions:
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/service-linked-roles-spot-instance-requests.html
_SPOT_ROLE = ("iam:CreateServiceLinkedRole",)
_SPOT = "spot.amazonaws.com"
# https://docs.aws.amazon.com/ebs/latest/userguide/ebs-encryption-requirements.html
_GRANT = ("kms:CreateGrant",)
_ENCRYPT = (
    "kms:Decrypt",
    "kms:DescribeKey",
    "kms:GenerateDataKeyWithoutPlaintext",
    "kms:ReEncryptFrom",
    "kms:ReEncryptTo",
)
# Only with --jump. https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/permissions-for-ec2-instance-connect-endpoint.html
_TUNNEL = ("ec2-instance-connect:OpenTunnel",)
# https://docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-getting-started-enable-ssh-connections.html
_SESSION = ("ssm:StartSession",)
# The plugin resumes a session whose connection broke.
_RESUME = ("ssm:ResumeSession",)
_CHANNEL = ("ssmmessages:OpenDataChannel",)
_OWN_SESSION = {"ssm:resourceTag/aws:ssmmessages:session-id": "${aws:userid}"}
CONNECTIONS = (*_TUNNEL, *_SESSION)
# Only with --push-to. Multipart uploads also use PutObject.
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/mpuoverview.html#mpuAndPermissions
_PUSH = ("s3:AbortMultipartUpload", "s3:PutObject")

# Only with --second-guard. Each statement has one kind of resource, so that IAM's simulator can evaluate it.
# https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazoneventbridgescheduler.html
# List actions have no resource. If they are denied, the user can't have created a guard.
_LOOK_FOR_GUARDS = ("scheduler:ListScheduleGroups", "scheduler:ListSchedules")
_SCHEDULES = (
    "scheduler:CreateSchedule",
    # Deleting a group deletes its schedules, and requires this permission.
    "scheduler:DeleteSchedule",
    "scheduler:UpdateSchedule",
)
_MAKE_GROUPS = ("scheduler:CreateScheduleGroup", "scheduler:TagResource")
_GROUPS = (
    "scheduler:DeleteScheduleGroup",
    "scheduler:GetScheduleGroup",
    "scheduler:ListTagsForResource",
)

# Only with --bucket or --read-from. https://docs.aws.amazon.com/service-authorization/latest/reference/list_awsidentityandaccessmanagementiam.html
_LOOK_FOR_PROFILES = ("iam:ListInstanceProfiles",)
_LOOK_AT_BUCKET = (
    "s3:GetEncryptionConfiguration",
    "s3:GetBucketVersioning",
    "s3:GetLifecycleConfiguration",
)
_MAKE_PROFILES = ("iam:CreateInstanceProfile", "iam:TagInstanceProfile")
_PROFILES = (
    "iam:AddRoleToInstanceProfile",
    "iam:DeleteInstanceProfile",
    "iam:GetInstanceProfile",
    "iam:RemoveRoleFromInstanceProfile",
)
# With any of these. Without the boundary's condition on all of these, a caller could give a role any rights.
_MAKE_ROLES = ("iam:CreateRole",)
_RIGHTS = ("iam:DeleteRolePolicy", "iam:DetachRolePolicy", "iam:PutRolePolicy")
_ROLES = ("iam:DeleteRole", "iam:ListAttachedRolePolicies", "iam:ListRolePolicies")
# PassRole can't be restricted by a tag on the role:
# https://docs.aws.amazon.com/IAM/latest/UserGuide/id_roles_use_passrole.html
_PASS = ("iam:PassRole",)
# https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_iam-quotas.html
_MOST_CHARACTERS = 6144


def build_policy(
    push_to: S3Location | None = None,
    instance_types: Sequence[str] = DEFAULT_TYPES,
    kms_key: str | None = None,
    *,
    second_guard: bool = False,
    bucket: S3Location | None = None,
    read_from: bool = False,
    bucket_kms_key: str | None = None,
    permissions_boundary: str | None = None,
    instance_role: str | None = None,
    jump: str | None = None,
) -> dict[str, Any]:
    """Return the policy as a JSON document.

    ``push_to`` adds uploads to S3, ``kms_key`` adds a customer-managed key for disks,
    ``second_guard`` adds the resources of ``up --second-guard``, ``bucket`` those of ``up --bucket`` and
    reading the results, ``read_from`` those of ``up --read-from``, and ``bucket_kms_key`` reading results
    that this key encrypts.
    With ``permissions_boundary``, all roles must have it. ``instance_role`` is the role of the profile
    of ``up --instance-profile``, with its path if it has one. ``jump`` is the way of ``up --jump``.
    """
    tagged = {f"aws:RequestTag/{tags.CLUSTER}": "false"}
    ours = {"Null": {f"aws:ResourceTag/{tags.CLUSTER}": "false"}}
    machine = {"ec2:InstanceType": list(instance_types), "ec2:MetadataHttpTokens": "required"}
    makers = sorted(action.removeprefix("ec2:") for action in (*_MAKE, *_RUN))
    named = _ec2(
        f"key-pair/{tags.resource_name('*')}", f"placement-group/{tags.resource_name('*')}"
    )
    made = [*_ec2("security-group/*"), *named, _IMAGES, "arn:*:ec2:*::snapshot/*"]
    ubuntu = "arn:*:ssm:*:*:parameter/aws/service/canonical/ubuntu/server/*"
    setting = f"arn:*:ssm:*:*:servicesetting{HOST_MANAGEMENT}"
    role = f"arn:*:iam::*:role/aws-service-role/{_SPOT}/AWSServiceRoleForEC2Spot"
    return {
        "Version": "2012-10-17",
        "Statement": [
            _allow("Look", sorted(_LOOK), "*"),
            _allow("Find", ("ssm:GetParameter", "ssm:GetServiceSetting"), [ubuntu, setting]),
            _allow("Machines", _RUN, _ec2("instance/*"), {"Null": tagged, "StringEquals": machine}),
            _allow(
                "Disks", _RUN, _ec2("volume/*"), {"Null": tagged, "Bool": {"ec2:Encrypted": "true"}}
            ),
            # EC2 checks the permission for a spot request only if the call tags it.
            _allow(
                "Interfaces",
                _RUN,
                _ec2("network-interface/*", "spot-instances-request/*"),
                {"Null": tagged},
            ),
            _allow("Inside", _INSIDE, _ec2("subnet/*", "vpc/*", "capacity-reservation/*")),
            _allow(
                "FromUbuntu",
                _RUN,
                [_IMAGES],
                {"StringEquals": {"ec2:Owner": _UBUNTU_OWNERS}},
            ),
            _allow("Make", _MAKE, made, {"Null": tagged}),
            _allow("TagNew", _TAG, "*", {"StringEquals": {"ec2:CreateAction": makers}}),
            _allow("UseOurOwn", _USE_OUR_OWN, "*", ours),
            _allow("Spot", _SPOT_ROLE, role, {"StringEquals": {"iam:AWSServiceName": _SPOT}}),
            *(_use_key(kms_key) if kms_key else []),
            *([_push(push_to)] if push_to else []),
            *([_pass("PassInstanceRole", instance_role, "ec2")] if instance_role else []),
            *_connect(jump),
            *(_guard(tagged, permissions_boundary) if second_guard else []),
            *(_profiles(tagged, permissions_boundary) if bucket or read_from else []),
            *(_bucket(bucket) if bucket else []),
            *({"Sid": "Decrypt", **each} for each in allow_key(bucket_kms_key, "Decrypt")),
        ],
    }


def _ec2(*resources: str) -> list[str]:
    return [f"arn:*:ec2:*:*:{resource}" for resource in resources]


def _use_key(key: str) -> list[dict[str, Any]]:
    via = {"StringLike": {"kms:ViaService": "ec2.*.amazonaws.com*"}}
    grant = {**via, "Bool": {"kms:GrantIsForAWSResource": "true"}}
    return [_allow("Grant", _GRANT, key, grant), _allow("Encrypt", _ENCRYPT, key, via)]


def _connect(jump: str | None) -> list[dict[str, Any]]:
    """Allow what the AWS CLI calls for the tunnels of ``--jump``, besides the Describe actions."""
    if jump == EICE:
        port = {"NumericEquals": {"ec2-instance-connect:remotePort": "22"}}
        return [_allow("Tunnel", _TUNNEL, _ec2("instance-connect-endpoint/*"), port)]
    if jump == SSM:
        ours = {"Null": {f"ssm:resourceTag/{tags.CLUSTER}": "false"}}
        return [
            _allow("Session", _SESSION, _ec2("instance/*"), ours),
            _allow("Document", _SESSION, "arn:*:ssm:*:*:document/AWS-StartSSHSession"),
            # Opening a channel also takes a token that only StartSession and ResumeSession return. The
            # names of roles' sessions do not begin with ${aws:userid}.
            _allow("Channel", _CHANNEL, "arn:*:ssm:*:*:session/*"),
            # https://docs.aws.amazon.com/systems-manager/latest/userguide/getting-started-restrict-access-examples.html
            _allow("Resume", _RESUME, "arn:*:ssm:*:*:session/*", {"StringLike": _OWN_SESSION}),
        ]
    return []


def _guard(tagged: dict[str, str], boundary: str | None) -> list[dict[str, Any]]:
    """Allow access to guards by name.

    Tags would not restrict it: unlike EC2, these services can't limit tagging to new resources.
    """
    named = tags.resource_name("*")
    groups = f"arn:*:scheduler:*:*:schedule-group/{named}"
    return [
        _allow("LookForGuards", _LOOK_FOR_GUARDS, "*"),
        _allow("Schedules", _SCHEDULES, f"arn:*:scheduler:*:*:schedule/{named}/*"),
        _allow("MakeGroups", _MAKE_GROUPS, groups, {"Null": tagged}),
        _allow("GuardGroups", _GROUPS, groups),
        *_roles("Guard", tags.guard_role("*", "*"), "scheduler", tagged, boundary),
        _allow("GetGuardRole", ("iam:GetRole",), f"arn:*:iam::*:role/{tags.guard_role('*', '*')}"),
    ]


def _profiles(tagged: dict[str, str], boundary: str | None) -> list[dict[str, Any]]:
    """Allow the nodes' roles and profiles, by name."""
    named = tags.profile_name("*", "*")
    profiles = f"arn:*:iam::*:instance-profile/{named}"
    return [
        _allow("LookForProfiles", _LOOK_FOR_PROFILES, "*"),
        _allow("MakeProfiles", _MAKE_PROFILES, profiles, {"Null": tagged}),
        _allow("Profiles", _PROFILES, profiles),
        *_roles("Node", named, "ec2", tagged, boundary),
    ]


def _bucket(place: S3Location) -> list[dict[str, Any]]:
    """Allow reading the results."""
    read, listing = allow_prefix(place, ("s3:GetObject",))
    return [
        {"Sid": "ReadResults", **read},
        {"Sid": "ListResults", **listing},
        _allow("LookAtBucket", _LOOK_AT_BUCKET, f"arn:*:s3:::{place.bucket}"),
    ]


def _roles(
    sid: str, name: str, service: str, tagged: dict[str, str], boundary: str | None
) -> list[dict[str, Any]]:
    """Allow the roles with this name, which a service of AWS assumes."""
    roles = f"arn:*:iam::*:role/{name}"
    bounded = {"StringEquals": {"iam:PermissionsBoundary": boundary}} if boundary else {}
    return [
        _allow(f"Make{sid}Roles", _MAKE_ROLES, roles, {"Null": tagged, **bounded}),
        _allow(f"Tag{sid}Roles", ("iam:TagRole",), roles, {"Null": tagged}),
        _allow(f"{sid}Rights", _RIGHTS, roles, bounded),
        _allow(f"{sid}Roles", _ROLES, roles),
        _pass(f"Pass{sid}Role", name, service),
    ]


def _pass(sid: str, name: str, service: str) -> dict[str, Any]:
    # In China, EC2's name ends in .cn; EventBridge Scheduler's does not.
    end = "*" if service == "ec2" else ""
    to = {"StringLike": {"iam:PassedToService": f"{service}.amazonaws.com{end}"}}
    return _allow(sid, _PASS, f"arn:*:iam::*:role/{name}", to)


def _push(place: S3Location) -> dict[str, Any]:
    return _allow("Push", _PUSH, f"arn:*:s3:::{place.bucket}/{place.below('*').prefix}")


def _allow(
    sid: str, actions: Sequence[str], resources: str | list[str], condition: Any = None
) -> dict[str, Any]:
    listed = resources if isinstance(resources, str) else list(resources)
    statement = {"Sid": sid, "Effect": "Allow", "Action": list(actions), "Resource": listed}
    return {**statement, "Condition": condition} if condition else statement


def split_policy(policy: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a policy as the fewest documents that fit into managed policies, which count no spaces."""
    parts: list[list[Any]] = [[]]
    for statement in policy["Statement"]:
        document = {**policy, "Statement": [*parts[-1], statement]}
        if len(json.dumps(document, separators=(",", ":"))) > _MOST_CHARACTERS:
            parts.append([])
        parts[-1].append(statement)
    return [{**policy, "Statement": part} for part in parts]


def parse_types(text: str | None) -> tuple[str, ...]:
    """Parse ``--instance-type``; raises :class:`UsageError`."""
    if text is None:
        return DEFAULT_TYPES
    return tuple(complete_type_name(check_type_name(name.strip())) for name in text.split(","))


def parse_role(text: str | None) -> str | None:
    """Parse ``--instance-profile``; raises :class:`UsageError`. A wildcard would pass any role."""
    if text is not None and not re.fullmatch(r"([\w.@=,+-]+/)*[\w.@=,+-]{1,64}", text):
        raise UsageError(
            f"--instance-profile {text!r}: expected a role's name, or its path and name"
        )
    return text


def parse_key(text: str | None, option: str) -> str | None:
    """Parse the ARN of a KMS key; raises :class:`UsageError`."""
    if text is not None and not re.fullmatch(KMS_KEY, text):
        raise UsageError(
            f"{option} {text!r}: expected arn:aws:kms:REGION:ACCOUNT:key/ID",
            hint="`aws ec2 get-ebs-default-kms-key-id` shows the key that encrypts new disks, and `aws s3api "
            "get-bucket-encryption` that of a bucket",
        )
    return text
