"""Messages when `up` fails: what, on which resource or [host],
what is left behind, and the commands that go on and that clean up.

Each row is a cloud or machine with a fault; ``golden/up.txt`` has the messages. What a message says is left
is compared with all that exists. Tests of the lifecycle remove what each action has left.
"""

from __future__ import annotations

import json
from pathlib import Path

from infra.ec2 import tags
from infra.errors import HostError
from provision.host import Result
from provision.stacks.load import load_stack
from tests.fakes import health_answer
from tests.golden import check_section
from tests.harness import failures as f
from tests.harness.command_line import CommandLine

_GOLDEN = Path(__file__).parent / "golden" / "up.txt"
# The head first, then an image, then the workers: the way with the most that can fail.
_UP = "up --nodes 2 --yes --bake head"
_MOMENT = {"began": 1.0, "ended": 2.0}
_HEALTH = json.dumps(health_answer(load_stack("upstream")))
_GOOD_HEAD = {"node": "node0", "code": 0, "text": _HEALTH, **_MOMENT}
_LOST_NODE = {"node": "node1", "code": 255, "text": "no route to host", **_MOMENT}
_WHILE_MAKING = (
    f.Row(
        "key not taken",
        _UP,
        faults=f.error("ImportKeyPair", "InternalError"),
        left="1 security group",
    ),
    f.Row(
        "group never shown",
        _UP,
        faults=f.error("AuthorizeSecurityGroupIngress", "InvalidGroup.NotFound"),
        left="1 security group",
    ),
    f.Row(
        "name taken by something else",
        _UP,
        faults=f.error("CreateSecurityGroup", "InvalidGroup.Duplicate"),
    ),
    f.Row("never boots", _UP, faults=f.machines("never-boots"), act=f.hurry, left=f.HEAD),
    f.Row("dies immediately", _UP, faults=f.machines("dies"), left=f.GROUPS),
    f.Row(
        "first boot failed",
        _UP,
        act=f.stage("node0", "cloud-init status", Result(1, "status: error\n", "")),
        left=f.HEAD,
    ),
    f.Row(
        "facts that nobody understands",
        _UP,
        act=f.stage("node0", "# querying the facts", Result(0, "what?", "")),
        left=f.HEAD,
    ),
    f.Row("no AMX on the head", _UP, faults=f.machines("no-amx"), left=f.HEAD),
    f.Row("no AMX on the workers", _UP, faults=f.machines("no-amx", *range(1, 9)), left=f.BOTH),
    f.Row(
        "installation failed",
        _UP,
        act=f.stage(
            "node0",
            "spr-cluster-install.sh",
            Result(100, "@step packages\nE: Unable to locate package libfoo\n", ""),
        ),
        left=f.HEAD,
    ),
    f.Row(
        "image refused", _UP, faults=f.error("CreateImage", "InvalidParameterValue"), left=f.HEAD
    ),
    f.Row("image failed", _UP, act=f.fail_images, left=f.HEAD_AND_IMAGE),
    f.Row("another key on the head's console", _UP, act=f.pin_wrong_key(0), left=f.HEAD),
    f.Row("another key inside the network", _UP, act=f.pin_wrong_key(1), left=f.BOTH),
    f.Row(
        "a worker that the head can't reach",
        _UP,
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
        act=f.all_of(
            f.begin, f.stage("node0", ".", HostError("node0", "no SSH at 172.31.0.4: timed out"))
        ),
        left=f.BOTH,
    ),
)


_WHILE_BUYING = (
    f.Row("no room anywhere", _UP, faults="[[capacity]]\nfree = 0\n", left=f.GROUPS),
    f.Row(
        "room for the head only",
        _UP,
        faults="[[capacity]]\nfree = 1\n",
        left=f"{f.GROUPS}, 1 image, 1 snapshot",
    ),
    f.Row(
        "quota that can't be asked for",
        "up --yes --no-placement-group",
        faults="[quota]\non_demand_vcpus = 32\n"
        + f.error("GetServiceQuota", "AccessDeniedException"),
        left="1 security group, 1 key pair",
    ),
    f.Row(
        "spot price too low",
        f"{_UP} --market spot --max-price 1",
        faults="[spot]\nusd_per_hour = 3.5\n",
        left=f.GROUPS,
    ),
    f.Row(
        "purchases throttled for ever",
        _UP,
        faults="[[throttle]]\naction = 'RunInstances'\nrate = 1\n",
        left=f.GROUPS,
    ),
    f.Row(
        "time over before the workers",
        f"{_UP} --ttl 50m",
        faults="boot_s = 1900\n",
        left=f.HEAD_AND_IMAGE,
    ),
)


@f.rows(_WHILE_MAKING, _WHILE_BUYING)
def test_a_failed_up_names_the_failure_what_is_left_and_how_to_remove_it(
    line: CommandLine, row: f.Row
) -> None:
    check_section(_GOLDEN, row.name, f.expect_failed_up(line, row))


def test_a_degraded_cluster_names_repair(line: CommandLine) -> None:
    line.begin("--nodes", "3")
    line.lose(line.ids()[1])
    result = line.run("train", "squad", "--demo")
    assert result.code == 1
    check_section(_GOLDEN, "degraded", result.message)

    line.lose(line.ids()[0])
    for argv in ("train squad --demo", "ssh", "extend 2h"):
        result = line.run(*argv.split())
        assert result.code == 2
        check_section(_GOLDEN, "no head", result.message)

    line.must("repair", "--yes")
    assert len(line.ids()) == 3


def test_resources_that_ec2_does_not_delete_are_named_with_the_reason(line: CommandLine) -> None:
    line.begin("--nodes", "2")
    reason = "resource sg-1 has a dependent object"
    line.cloud.faults(f.error("DeleteSecurityGroup", "DependencyViolation", reason))
    f.hurry(line)

    result = line.run("down", "--yes")

    assert result.code == 1
    check_section(_GOLDEN, "not deleted", f.plain(result.message))
    line.cloud.faults("")
    line.must("down", *f.FLAGS.split(), "--yes")
    assert line.cloud.left() == []


def test_a_forgotten_cluster_that_can_not_be_removed_is_named(line: CommandLine) -> None:
    ec2 = line.cloud.fake.clients.ec2
    for name in ("older", "old"):
        labels = tags.tag_specifications(["volume"], {tags.CLUSTER: name})
        ec2.create_volume(AvailabilityZone="us-east-1a", Size=20, TagSpecifications=labels)
    line.cloud.faults(f.error("DeleteVolume", "UnauthorizedOperation", times=2))

    result = line.run("gc", "--yes")

    assert (result.code, result.out) == (1, "Removed: older.\n")
    check_section(_GOLDEN, "not removed", result.message)
    assert len(line.cloud.left()) == 1
