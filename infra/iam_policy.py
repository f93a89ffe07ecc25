"""The least-privilege IAM policy for all commands.

The tests run a cluster's whole life with exactly these actions, and without each of them. They do not
check the conditions, because moto ignores those. Conditions by action: https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonec2.html
"""

from __future__ import annotations

import json
from typing import Any

from infra import tags
from infra.s3 import S3Location

_LOOK = (
    "ec2:DescribeAddresses",
    "ec2:DescribeImages",
    "ec2:DescribeInstanceStatus",
    "ec2:DescribeInstanceTypeOfferings",
    "ec2:DescribeInstanceTypes",
    "ec2:DescribeInstances",
    "ec2:DescribeKeyPairs",
    "ec2:DescribeLaunchTemplates",
    "ec2:DescribeNetworkInterfaces",
    "ec2:DescribePlacementGroups",
    "ec2:DescribeRegions",
    "ec2:DescribeSecurityGroups",
    "ec2:DescribeSnapshots",
    "ec2:DescribeSpotInstanceRequests",
    "ec2:DescribeSubnets",
    "ec2:DescribeVolumes",
    "ec2:GetConsoleOutput",
    "servicequotas:GetServiceQuota",
    "ssm:GetParameter",
)
_MAKE = (
    "ec2:CreatePlacementGroup",
    "ec2:CreateSecurityGroup",
    "ec2:ImportKeyPair",
    "ec2:RunInstances",
)
# An image is a copy of a machine's disk, so only our own machines; new images have no tag yet.
_COPY = ("ec2:CreateImage",)
# The right to tag everything is the right to delete everything, so tag only new or own resources.
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/supported-iam-actions-tagging.html
_TAG = ("ec2:CreateTags",)
_CHANGE_OUR_OWN = (
    "ec2:AuthorizeSecurityGroupEgress",
    "ec2:AuthorizeSecurityGroupIngress",
    "ec2:CancelSpotInstanceRequests",
    *_TAG,
    "ec2:DeleteKeyPair",
    "ec2:DeleteLaunchTemplate",
    "ec2:DeleteNetworkInterface",
    "ec2:DeletePlacementGroup",
    "ec2:DeleteSecurityGroup",
    "ec2:DeleteSnapshot",
    "ec2:DeleteVolume",
    "ec2:DeregisterImage",
    "ec2:ReleaseAddress",
    "ec2:RevokeSecurityGroupIngress",
    "ec2:TerminateInstances",
)
# Only with --push-to. Multipart uploads need PutObject, too.
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/mpuoverview.html#mpuAndPermissions
_PUSH = ("s3:AbortMultipartUpload", "s3:PutObject")

# Only with --second-guard. AWS accepts lists on all resources only.
_LOOK_FOR_GUARDS = ("scheduler:ListScheduleGroups", "scheduler:ListSchedules")
_GUARD = (
    "iam:CreateRole",
    "iam:DeleteRole",
    "iam:DeleteRolePolicy",
    "iam:GetRole",
    "iam:PutRolePolicy",
    "iam:TagRole",
    "scheduler:CreateSchedule",
    "scheduler:CreateScheduleGroup",
    "scheduler:DeleteSchedule",
    "scheduler:DeleteScheduleGroup",
    "scheduler:GetScheduleGroup",
    "scheduler:ListTagsForResource",
    "scheduler:TagResource",
    "scheduler:UpdateSchedule",
)
_GUARD_ROLES = "arn:*:iam::*:role/spr-cluster-*"
_OF_GUARDS = [
    _GUARD_ROLES,
    "arn:*:scheduler:*:*:schedule-group/spr-cluster-*",
    "arn:*:scheduler:*:*:schedule/spr-cluster-*/*",
]


def build_policy(
    push_to: S3Location | None = None, *, second_guard: bool = False
) -> dict[str, Any]:
    """Return the policy as IAM's JSON document; ``push_to`` adds uploads to S3."""
    guard = [
        _allow("LookForGuards", _LOOK_FOR_GUARDS),
        _allow("Guard", _GUARD, None, _OF_GUARDS),
        _allow(
            "GiveTheGuardItsRole",
            ("iam:PassRole",),
            {"StringEquals": {"iam:PassedToService": "scheduler.amazonaws.com"}},
            [_GUARD_ROLES],
        ),
    ]
    makers = sorted(action.removeprefix("ec2:") for action in (*_MAKE, *_COPY))
    in_the_making = {"StringEquals": {"ec2:CreateAction": makers}}
    ours = {"Null": {f"aws:ResourceTag/{tags.CLUSTER}": "false"}}
    objects = f"arn:*:s3:::{push_to.bucket}/{push_to.below('*').prefix}" if push_to else ""
    return {
        "Version": "2012-10-17",
        "Statement": [
            _allow("Look", _LOOK),
            _allow("Make", _MAKE),
            _allow("CopyOurOwnMachines", _COPY, ours, ["arn:*:ec2:*:*:instance/*"]),
            _allow("IntoImages", _COPY, None, ["arn:*:ec2:*::image/*", "arn:*:ec2:*::snapshot/*"]),
            _allow("TagWhatIsBeingMade", _TAG, in_the_making),
            _allow("ChangeOurOwn", _CHANGE_OUR_OWN, ours),
            *([_allow("Push", _PUSH, None, [objects])] if push_to else []),
            *(guard if second_guard else []),
        ],
    }


def _allow(
    sid: str, actions: tuple[str, ...], condition: Any = None, resources: Any = "*"
) -> dict[str, Any]:
    statement = {"Sid": sid, "Effect": "Allow", "Action": list(actions), "Resource": resources}
    return {**statement, "Condition": condition} if condition else statement


def render_policy(push_to: S3Location | None = None, *, second_guard: bool = False) -> str:
    """Return the policy as JSON text."""
    return json.dumps(build_policy(push_to, second_guard=second_guard), indent=2)
