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
_THREE = "up --nodes 3 --yes"
_HEALTH = json.dumps(health_answer(load_stack("upstream")))
_LOST = "".join(
    json.dumps({"node": node, "code": code, "text": text, "began": 1.0, "ended": 2.0}) + "\n"
    for node, code, text in (("node0", 0, _HEALTH), ("node1", 255, "no route to host"))
)
_NO_PACKAGE = "@step packages\nE: Unable to locate package libfoo\n"
_NO_SSH = HostError("node0", "no SSH at 172.31.0.4: timed out")
_SILENT = f.all_of(f.begin, f.stage("node0", ".", _NO_SSH))


def _says(pattern: str, code: int, text: str) -> f.Act:
    return f.stage("node0", pattern, Result(code, text, ""))


_GROUP = "1 security group"
_UNSEEN = f.error("AuthorizeSecurityGroupIngress", "InvalidGroup.NotFound")
_WHILE_MAKING = (
    f.Row("key not taken", _UP, f.error("ImportKeyPair", "InternalError"), left=_GROUP),
    f.Row("group never shown", _UP, _UNSEEN, left=_GROUP),
    f.Row("name taken by something else", _UP, f.error("CreateSecurityGroup", "InvalidGroup.Duplicate")),
    f.Row("never boots", _UP, f.machines("never-boots"), act=f.hurry, left=f.HEAD),
    f.Row("first boot failed", _UP, act=_says("cloud-init status", 1, "status: error\n"), left=f.HEAD),
    f.Row("facts that nobody understands", _UP, act=_says("# querying the facts", 0, "what?"), left=f.HEAD),
    f.Row("no AMX on the head", _UP, f.machines("no-amx"), left=f.HEAD),
    f.Row("installation failed", _UP, act=_says("spr-cluster-install.sh", 100, _NO_PACKAGE), left=f.HEAD),
    f.Row("image failed", _UP, act=f.fail_images, left=f.HEAD_AND_IMAGE),
    f.Row("another key on the head's console", _UP, act=f.pin_wrong_key(0), left=f.HEAD),
    f.Row("a worker that the head can't reach", _UP, act=_says("querying the health", 0, _LOST), left=f.BOTH),
    f.Row("a head that has been connected, and is silent", _THREE, act=_SILENT, left=f.BOTH),
)  # fmt: skip


_SMALL_QUOTA = "[quota]\non_demand_vcpus = 32\n"
_UNKNOWN_QUOTA = _SMALL_QUOTA + f.error("GetServiceQuota", "AccessDeniedException")
_NO_GROUP = "up --yes --no-placement-group"
_CHEAP = f"{_UP} --market spot --max-price 1"
_WHILE_BUYING = (
    f.Row("room for the head only", _UP, "[[capacity]]\nfree = 1\n", left=f"{f.GROUPS}, 1 image, 1 snapshot"),
    f.Row("quota that can't be asked for", _NO_GROUP, _UNKNOWN_QUOTA, left=f"{_GROUP}, 1 key pair"),
    f.Row("spot price too low", _CHEAP, "[spot]\nusd_per_hour = 3.5\n", left=f.GROUPS),
    f.Row("time over before the workers", f"{_UP} --ttl 50m", "boot_s = 1900\n", left=f.HEAD_AND_IMAGE),
)  # fmt: skip


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
