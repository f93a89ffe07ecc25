"""Messages when EC2 sells no machine: what, on which resource or [host],
what is left behind, and the commands that go on and that clean up.

Each row is a cloud or machine with a fault, and the message, word for word. What it says is left is
compared with all that exists, and the command that it names is run.
"""

from __future__ import annotations

from tests.harness import failures as f
from tests.harness.command_line import CommandLine

# The head first, then an image, then the workers: the way with the most that can fail.
_UP = "up --nodes 2 --yes --bake head"
_CODES = (
    "\n  → error codes: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html"
)
_SUPPORT = "only AWS Support can change that: https://console.aws.amazon.com/support"
_ANOTHER = (
    "\n  → try several types (--instance-type r7iz.metal-16xl,m7i.metal-24xl), another "
    "--region, or later: `up --wait-for-capacity 2h` keeps trying"
)
_NO_VCPUS = (
    "VcpuLimitExceeded: You have requested more vCPU capacity than your current vCPU limit of "
    "{} allows for the instance bucket that the specified instance type belongs to\n  → request more "
    "on-demand vCPUs (quota L-1216C47A) in the Service Quotas console, or use fewer --nodes"
)
_NO_ROLE = (
    "The provided credentials do not have permission to create the service-linked role for EC2 "
    "Spot Instances."
)


def _tried(*offers: str, reason: str) -> str:
    return "".join(
        f"\n  r7iz.metal-16xl in {offer}: {reason.format(offer[:10])}" for offer in offers
    )


# https://github.com/splunk/attack_range/issues/1302
_NOT_FREE = "The specified instance type is not eligible for Free Tier."
_ZONES = [f"us-east-1{zone}" for zone in "abcdf"]
_IN_GROUP = ", in the placement group"
_FULL = (
    "InsufficientInstanceCapacity: We currently do not have sufficient r7iz.metal-16xl capacity in "
    "the Availability Zone you requested ({})"
)

_WHILE_BUYING = (
    f.Row(
        "no room anywhere",
        _UP,
        "no zone has capacity for 1 machine; tried:"
        + _tried(*(z + _IN_GROUP for z in _ZONES), *_ZONES, reason=_FULL)
        + _ANOTHER,
        faults="[[capacity]]\nfree = 0\n",
        left=f.GROUPS,
    ),
    f.Row(
        "room for the head only",
        _UP,
        "no single zone has capacity for 2 machines; tried:"
        + _tried(*(z + _IN_GROUP for z in _ZONES), *_ZONES, reason=_FULL)
        + _ANOTHER,
        faults="[[capacity]]\nfree = 1\n",
        left=f"{f.GROUPS}, 1 image, 1 snapshot",
    ),
    f.Row(
        "quota that can't be asked for",
        "up --yes --no-placement-group",
        "no zone has capacity for 1 machine; tried:"
        + _tried("us-east-1a", reason=_NO_VCPUS.format(32)),
        faults="[quota]\non_demand_vcpus = 32\n"
        + f.error("GetServiceQuota", "AccessDeniedException"),
        left="1 security group, 1 key pair",
    ),
    f.Row(
        "spot price too low",
        f"{_UP} --market spot --max-price 1",
        "no zone has capacity for 1 machine; tried:\n  r7iz.metal-16xl in us-east-1a, spot, in the placement "
        "group: SpotMaxPriceTooLow: Your Spot request price of 1 is lower than the minimum "
        "required Spot request fulfillment price of 3.5\n  → raise --max-price, or use "
        "--market spot-or-on-demand",
        faults="[spot]\nusd_per_hour = 3.5\n",
        left=f.GROUPS,
    ),
    f.Row(
        "no role for spot",
        f"{_UP} --market spot",
        f"RunInstances failed: AuthFailure.ServiceLinkedRoleCreationNotPermitted: {_NO_ROLE}\n  "
        "→ spot needs a role that is created once per account: aws iam create-service-linked-role "
        "--aws-service-name spot.amazonaws.com; `spr-cluster iam-policy` includes the permission",
        faults=f.error(
            "RunInstances", "AuthFailure.ServiceLinkedRoleCreationNotPermitted", _NO_ROLE
        ),
        left=f.GROUPS,
    ),
    f.Row(
        "account blocked",
        _UP,
        f"RunInstances failed: Blocked: told by EC2\n  → {_SUPPORT}",
        faults=f.error("RunInstances", "Blocked"),
        left=f.GROUPS,
    ),
    f.Row(
        "account not verified",
        _UP,
        "RunInstances failed: PendingVerification: told by EC2\n  → this takes minutes, at "
        f"most four hours; after that {_SUPPORT}",
        faults=f.error("RunInstances", "PendingVerification"),
        left=f.GROUPS,
    ),
    f.Row(
        "an account on the free plan",
        _UP,
        f"RunInstances failed: InvalidParameterCombination: {_NOT_FREE}\n  → this account is on AWS's "
        "free plan, which offers only a few small types: upgrade it in the console (Billing and Cost "
        "Management)",
        faults=f.error("RunInstances", "InvalidParameterCombination", _NOT_FREE),
        left=f.GROUPS,
    ),
    f.Row(
        "purchases throttled for ever",
        _UP,
        f"RunInstances failed: RequestLimitExceeded: Request limit exceeded.{f.BUSY}",
        faults="[[throttle]]\naction = 'RunInstances'\nrate = 1\n",
        left=f.GROUPS,
    ),
    f.Row(
        "purchase not allowed",
        _UP,
        "no permission for RunInstances: told by EC2\n  → ask an administrator to allow "
        "RunInstances (`spr-cluster iam-policy` prints the full policy; add --check to see what "
        "is missing), or choose another AWS_PROFILE",
        faults=f.error("RunInstances", "UnauthorizedOperation"),
        left=f.GROUPS,
    ),
    f.Row(
        "time over before the workers",
        f"{_UP} --ttl 31m",
        "the time to live ended before the worker nodes were bought\n  → use a longer --ttl: bare "
        "metal takes up to 20 minutes to start, and an image may take an hour",
        faults="boot_s = 1900\n",
        left=f.HEAD_AND_IMAGE,
    ),
    f.Row(
        "an unknown refusal",
        _UP,
        f"RunInstances failed: Novelty: told by EC2{_CODES}",
        faults=f.error("RunInstances", "Novelty"),
        left=f.GROUPS,
    ),
)


@f.rows(_WHILE_BUYING)
def test_a_refused_purchase_lists_what_was_tried_what_is_left_and_how_to_remove_it(
    line: CommandLine, row: f.Row
) -> None:
    f.expect_failed_up(line, row)
