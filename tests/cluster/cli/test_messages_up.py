"""Messages when `up` fails: what, on which resource or [host],
what is left behind, and the commands that go on and that clean up.

Each row is a cloud or machine with a fault, and the message, word for word. What it says is left is
compared with all that exists, and the command that it names is run.
"""

from __future__ import annotations

import json

import pytest

from infra.ec2 import tags
from infra.errors import HostError
from provision.host import Result
from provision.stacks.load import load_stack
from tests.fakes import health_answer
from tests.harness import failures as f
from tests.harness.command_line import CommandLine

# The head first, then an image, then the workers: the way with the most that can fail.
_UP = "up --nodes 2 --yes --bake head"
_DID_NOT_COME = "the cluster did not come up: "
_AGAIN = (
    "\n  → try another --instance-type or --region; `spr-cluster ssh --name spr` into a node may "
    "show more"
)
_MOMENT = {"began": 1.0, "ended": 2.0}
_HEALTH = json.dumps(health_answer(load_stack("upstream")))
_GOOD_HEAD = {"node": "node0", "code": 0, "text": _HEALTH, **_MOMENT}
_LOST_NODE = {"node": "node1", "code": 255, "text": "no route to host", **_MOMENT}
_CODES = (
    "\n  → error codes: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html"
)
_WRONG_KEY = (
    "the SSH host key pinned here for i-0 is not the node's: pinned ssh-ed25519 SHA256:0; the "
    "node's ssh-ed25519 SHA256:0\n  → The connections since the first contact may have been "
    "intercepted: do not use the node; terminate it, and continue from another network. If the "
    "node's keys in /etc/ssh were regenerated on purpose, remove the old one: "
    "ssh-keygen -R i-0 -f 'HOME/spr/known_hosts'"
)
_WHILE_MAKING = (
    f.Row(
        "key not taken",
        _UP,
        f"ImportKeyPair failed: InternalError: told by EC2{f.BUSY}",
        faults=f.error("ImportKeyPair", "InternalError"),
        left="1 security group",
    ),
    f.Row(
        "group never shown",
        _UP,
        f"AuthorizeSecurityGroupIngress failed: InvalidGroup.NotFound: told by EC2{_CODES}",
        faults=f.error("AuthorizeSecurityGroupIngress", "InvalidGroup.NotFound"),
        left="1 security group",
    ),
    f.Row(
        "name taken by something else",
        _UP,
        _DID_NOT_COME
        + "told by EC2\n  → a resource without the cluster's tag has the same name: remove it, or "
        "choose another --name",
        faults=f.error("CreateSecurityGroup", "InvalidGroup.Duplicate"),
    ),
    f.Row(
        "never boots",
        _UP,
        _DID_NOT_COME + f"node0 (i-0): pending: boot timed out after 40 min{_AGAIN}",
        faults=f.machines("never-boots"),
        act=f.hurry,
        left=f.HEAD,
    ),
    f.Row(
        "dies at once",
        _UP,
        _DID_NOT_COME
        + f"node0 (i-0): terminated: Server.InternalError: Internal error on launch{_AGAIN}",
        faults=f.machines("dies"),
        left=f.GROUPS,
    ),
    f.Row(
        "first boot failed",
        _UP,
        _DID_NOT_COME + f"node0 (i-0): cloud-init failed: status: error{_AGAIN}",
        act=f.stage("node0", "cloud-init status", Result(1, "status: error\n", "")),
        left=f.HEAD,
    ),
    f.Row(
        "facts that nobody understands",
        _UP,
        _DID_NOT_COME + f"node0 (i-0): its facts can't be read: unexpected answer 'what?'{_AGAIN}",
        act=f.stage("node0", "# querying the facts", Result(0, "what?", "")),
        left=f.HEAD,
    ),
    f.Row(
        "no AMX on the head",
        _UP,
        "[node0] no AMX: Xeon lacks amx_bf16, amx_int8, amx_tile\n  → choose a type with AMX "
        "(--instance-type r7iz.metal-16xl), or continue without it: --allow-no-amx",
        faults=f.machines("no-amx"),
        left=f.HEAD,
    ),
    f.Row(
        "no AMX on the workers",
        _UP,
        _DID_NOT_COME + f"node1 (i-0): no AMX: lacks amx_bf16, amx_int8, amx_tile{_AGAIN}",
        faults=f.machines("no-amx", *range(1, 9)),
        left=f.BOTH,
    ),
    f.Row(
        "installation failed",
        _UP,
        "[node0] installing stack upstream failed: E: Unable to locate package libfoo\n  → the "
        "whole log is /var/log/spr-cluster-install.log on the node",
        act=f.stage(
            "node0",
            "spr-cluster-install.sh",
            Result(100, "@step packages\nE: Unable to locate package libfoo\n", ""),
        ),
        left=f.HEAD,
    ),
    f.Row(
        "image refused",
        _UP,
        f"CreateImage failed: InvalidParameterValue: told by EC2{_CODES}",
        faults=f.error("CreateImage", "InvalidParameterValue"),
        left=f.HEAD,
    ),
    f.Row(
        "image failed",
        _UP,
        "image ami-0 failed: no reason given\n  → run the same command again to create a new image",
        act=f.fail_images,
        left=f.HEAD_AND_IMAGE,
    ),
    f.Row(
        "another key on the head's console",
        _UP,
        f"[node0] {_WRONG_KEY}",
        act=f.pin_wrong_key(0),
        left=f.HEAD,
    ),
    f.Row(
        "another key inside the network",
        _UP,
        f"[node1] {_WRONG_KEY}",
        act=f.pin_wrong_key(1),
        left=f.BOTH,
    ),
    f.Row(
        "a worker that the head can't reach",
        _UP,
        _DID_NOT_COME + f"node1 (i-0): the head can't connect over SSH: no route to host{_AGAIN}",
        act=f.stage(
            "node0",
            "# querying the health of all nodes",
            Result(
                0,
                "".join(
                    f"{json.dumps({**row, 'began': 1.0, 'ended': 2.0})}\n"
                    for row in (_GOOD_HEAD, _LOST_NODE)
                ),
                "",
            ),
        ),
        left=f.BOTH,
    ),
    f.Row(
        "a head that has been connected, and is silent",
        "up --nodes 3 --yes",
        "[node0] the head i-0 does not answer: SSH on node0 timed out after 40 min: no SSH at "
        "172.31.0.4: timed out\n  → is this machine's address in --ssh-cidr? If the head is lost, run "
        f"`aws ec2 terminate-instances --region us-east-1 --instance-ids i-0`, then "
        f"`spr-cluster repair {f.FLAGS}`, "
        "which makes a worker the head",
        act=f.all_of(
            f.run(_UP), f.stage("node0", ".", HostError("node0", "no SSH at 172.31.0.4: timed out"))
        ),
        left=f.BOTH,
    ),
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


@f.rows(_WHILE_MAKING, _WHILE_BUYING)
def test_a_failed_up_names_the_failure_what_is_left_and_how_to_remove_it(
    line: CommandLine, row: f.Row
) -> None:
    f.expect_failed_up(line, row)


def test_a_degraded_cluster_names_repair(line: CommandLine) -> None:
    line.begin("--nodes", "3")
    line.lose(line.ids()[1])
    result = line.run("train", "squad", "--demo")
    assert (result.code, result.message) == (
        1,
        "cluster spr is degraded: 2 of 3 nodes running\n  → `spr-cluster repair --name spr` "
        "replaces and connects them, `spr-cluster status --name spr` shows them",
    )

    line.lose(line.ids()[0])
    for argv in ("train squad --demo", "ssh", "extend 2h"):
        result = line.run(*argv.split())
        assert (result.code, result.message) == (
            2,
            "cluster 'spr' has no running head node\n  → `spr-cluster repair --name spr` makes "
            "a worker the head, `spr-cluster down --name spr` removes the cluster",
        )

    line.must("repair", "--yes")
    assert len(line.ids()) == 3


def test_resources_that_ec2_does_not_delete_are_named_with_the_reason(line: CommandLine) -> None:
    line.begin("--nodes", "2", "--bake", "head")
    reason = "resource sg-1 has a dependent object"
    line.cloud.faults(f.error("DeleteSecurityGroup", "DependencyViolation", reason))

    result = line.run("down", "--yes")

    assert result.code == 1
    assert f.plain(result.message) == (
        "still there after `down`: 1 security group (sg-0)\n  deleting sg-0 timed out after 20 s: "
        "An error occurred (DependencyViolation) when calling the DeleteSecurityGroup "
        f"operation: {reason}\n  → run `spr-cluster down {f.FLAGS}` again; these resources may still cost "
        f"money{f.EVENTS_HINT}"
    )
    line.cloud.faults("")
    line.must("down", *f.FLAGS.split(), "--yes")
    assert line.cloud.left() == []


@pytest.mark.full
def test_machines_that_do_not_end_are_named(line: CommandLine) -> None:
    line.begin("--nodes", "2", "--bake", "head")
    line.cloud.faults("terminate_s = 80000\n")
    line.cloud.clock.pace = 10

    result = line.run("down", "--yes")

    assert result.code == 1
    message = f.plain(result.message)
    assert message.startswith(
        "still there after `down`: 2 instances (i-0, i-0); 2 volumes (vol-0, "
    )
    assert message.endswith(
        "\n  termination of i-0, i-0 timed out after 20 min\n"
        f"  → run `spr-cluster down {f.FLAGS}` again; these resources may still cost money{f.EVENTS_HINT}"
    )


def test_a_forgotten_cluster_that_can_not_be_removed_is_named(line: CommandLine) -> None:
    ec2 = line.cloud.fake.clients.ec2
    for name in ("older", "old"):
        labels = tags.tag_specifications(["volume"], {tags.CLUSTER: name})
        ec2.create_volume(AvailabilityZone="us-east-1a", Size=20, TagSpecifications=labels)
    line.cloud.faults(f.error("DeleteVolume", "UnauthorizedOperation", times=2))

    result = line.run("gc", "--yes")

    assert (result.code, result.out) == (1, "Removed: older.\n")
    assert result.message == (
        "1 of 2 clusters not removed:\n  old (us-east-1): no permission for DeleteVolume: told by "
        "EC2\n  → ask an administrator to allow DeleteVolume (`spr-cluster iam-policy` prints the full "
        "policy; add --check to see what is missing), or choose another AWS_PROFILE"
    )
    assert len(line.cloud.left()) == 1


def test_nodes_that_cannot_be_extended_are_named(line: CommandLine) -> None:
    line.begin("--nodes", "2", "--bake", "head")
    line.stage("node1", ".", HostError("node1", "no SSH at 172.31.0.5: timed out"))

    result = line.run("extend", "2h")

    assert result.code == 1
    assert result.message == (
        "extending failed on 1 of 2 nodes:\n  [node1] no SSH at 172.31.0.5: timed out\n  → the tags "
        "have the new time, but some nodes still have the old one: `spr-cluster extend 1m "
        f"{f.FLAGS}` sets it on all nodes; `spr-cluster repair {f.FLAGS}` replaces lost nodes"
    )
    line.machines.staged.clear()
    line.must("extend", "1m", *f.FLAGS.split())
    expires = {line.cloud.machine(id_)["expires"] for id_ in line.ids()}
    assert len(expires) == 1
