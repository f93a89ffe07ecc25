"""The IAM policy that `iam-policy` prints: enough for a cluster's whole life, and no action too many.

moto judges by actions alone: it takes every condition as not fulfilled, and a statement about certain
resources as one about none, which would deny all that they allow. So here the policy is put in force
without these, and what they are about is shown from the calls themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from moto.ec2.models.elastic_ip_addresses import ElasticAddress

from infra import tags
from infra.iam_policy import build_policy
from infra.local.ec2_spot_requests import SpotRequest
from tests.harness.command_line import ApiCall, CommandLine, CommandResult, open_command_line
from tests.infra.local.fakes import Endpoint

_ACTIONS = tuple(dict.fromkeys(a for s in build_policy()["Statement"] for a in s["Action"]))
# Their absence stops nothing; what the user is told instead.
_INFORMATIVE = {
    "ec2:GetConsoleOutput": "its host key was accepted on first contact: the console does not show",
    "servicequotas:GetServiceQuota": "you have unknown (no permission to ask)",
}
# The parameters by which calls name what they change. What is not named by its id is looked up.
_NAMED_BY = (
    "AllocationId",
    "GroupId",
    "GroupName",
    "ImageId",
    "InstanceId",
    "KeyPairId",
    "LaunchTemplateId",
    "NetworkInterfaceId",
    "ResourceId",
    "SnapshotId",
    "SpotInstanceRequestId",
    "VolumeId",
)


@pytest.fixture
def line(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CommandLine]:
    with open_command_line(endpoint, tmp_path, monkeypatch) as line:
        yield line


def allow(line: CommandLine, folder: Path, *, less: str = "") -> None:
    """Put the policy in force, without conditions and resources, and without one of its actions."""
    policy = build_policy()
    for statement in policy["Statement"]:
        statement.pop("Condition", None)
        statement["Resource"] = "*"
        statement["Action"] = [action for action in statement["Action"] if action != less]
    file = folder / "policy.json"
    file.write_text(json.dumps(policy))
    line.cloud.faults(f'[iam]\npolicy = "{file}"\n')


def leave_orphans(line: CommandLine) -> None:
    """What a cluster of another time has left: one of each kind that no machine takes along."""
    cloud = line.cloud.fake
    labels = {tags.CLUSTER: "old"}

    def specified(kind: str) -> Any:
        return tags.tag_specifications([kind], labels)

    ec2 = cloud.clients.ec2
    zone, subnet = "us-east-1a", ec2.describe_subnets()["Subnets"][0]["SubnetId"]
    ec2.create_volume(AvailabilityZone=zone, Size=20, TagSpecifications=specified("volume"))
    ec2.create_network_interface(SubnetId=subnet, TagSpecifications=specified("network-interface"))
    ec2.create_launch_template(
        LaunchTemplateName="old",
        LaunchTemplateData={"InstanceType": "r7iz.metal-16xl"},
        TagSpecifications=specified("launch-template"),
    )
    # The embedded cloud gives none away, so one is put there.
    cloud.backend.addresses.append(ElasticAddress(cloud.backend, "vpc", "192.0.2.1", labels))
    # Nor does a machine's end leave a request open.
    nobody = SimpleNamespace(id="", placement=SimpleNamespace(zone=zone))
    request = SpotRequest(cloud.backend, nobody, {}, labels)
    cloud.backend.spot_instance_requests[request.id] = request


def live(line: CommandLine) -> Iterator[CommandResult]:
    """A cluster's life, command by command, until one of them fails."""
    types = ("--instance-type", "r7iz.metal-16xl,m7i.metal-24xl")
    for step in (
        ("list", "--all-regions"),
        ("gc", "--yes"),
        ("up", "--nodes", "2", "--spot", "--spot-or-on-demand", *types, "--yes"),
        ("status",),
        ("up", "--nodes", "3", "--yes"),
        ("repair", "--yes"),
        ("extend", "2h"),
        ("up", "--yes"),
        ("down", "--yes"),
    ):
        if step[0] == "repair":
            line.lose(line.ids()[-1])
            # The status checks of younger metal machines are not asked for.
            line.cloud.clock.now += 2400
        if step[0] == "extend":
            line.caller = "198.51.100.9/32"
        result = line.run(*step)
        yield result
        if result.code != 0:
            return


def test_a_clusters_lifecycle_needs_these_actions_and_no_others(
    line: CommandLine, tmp_path: Path
) -> None:
    leave_orphans(line)
    line.call_log.calls.clear()
    allow(line, tmp_path)

    for result in live(line):
        assert result.code == 0, result.err

    assert line.cloud.left() == []
    # Where nothing on record says that there is a second guard, a denied look for one stops nothing.
    looks = {"scheduler:ListScheduleGroups", "scheduler:ListSchedules"}
    assert {seen.action for seen in line.call_log.calls} - looks == set(_ACTIONS)


@pytest.mark.parametrize(
    "action",
    [
        # A life takes seconds: every third always, all of them in the full run.
        pytest.param(action, marks=() if number % 3 == 0 or informs else pytest.mark.full)
        for number, action in enumerate(_ACTIONS)
        for informs in (action in _INFORMATIVE,)
    ],
)
def test_without_any_one_of_its_actions_a_life_is_poorer_and_says_which(
    line: CommandLine, tmp_path: Path, action: str
) -> None:
    leave_orphans(line)
    allow(line, tmp_path, less=action)
    operation = action.partition(":")[2]

    result = list(live(line))

    if action in _INFORMATIVE:
        assert result[-1].code == 0, result[-1].err
        assert _INFORMATIVE[action] in "".join(each.err for each in result)
        return
    assert result[-1].code == 1
    assert f"no permission for {operation}: " in result[-1].message
    hint = f"ask an administrator to allow {operation} (`spr-cluster iam-policy` prints the full policy"
    assert f"\n  → {hint}" in result[-1].message


def test_what_is_changed_or_taken_away_carries_our_tag_at_that_moment(line: CommandLine) -> None:
    """That is what the policy's condition asks AWS to look at."""
    leave_orphans(line)
    ours = {"Null": {f"aws:ResourceTag/{tags.CLUSTER}": "false"}}
    statements = [s for s in build_policy()["Statement"] if s.get("Condition") == ours]
    asked = {action for statement in statements for action in statement["Action"]}
    assert asked >= {"ec2:TerminateInstances", "ec2:DeleteVolume", "ec2:CreateImage"}
    named: dict[str, list[str]] = {}

    def look(seen: ApiCall) -> None:
        if seen.action in asked:
            named.setdefault(seen.action, []).extend(ids_in(seen))
            for id_ in ids_in(seen):
                assert tags.CLUSTER in labels_of(line, id_), f"{seen.action} of {id_}"

    line.call_log.before.append(look)
    for result in live(line):
        assert result.code == 0, result.err

    assert named.keys() == asked
    assert all(named.values())


def ids_in(seen: ApiCall) -> list[str]:
    """What a call is about."""
    return [value for key, value in seen.parameters.items() if key.partition(".")[0] in _NAMED_BY]


def labels_of(line: CommandLine, id_: str) -> dict[str, str]:
    """A resource's tags now; key pairs and placement groups are named, others have an id."""
    backend = line.cloud.fake.backend
    resource = backend.placement_groups.by_name.get(id_)
    found: dict[str, str] = dict(backend.tags.get(resource.id if resource else id_, {}))
    return found


def test_only_new_resources_and_ours_can_be_tagged() -> None:
    """Whoever may tag anything may make it look like ours, and take it away."""
    *_, in_the_making, ours = build_policy()["Statement"]
    assert in_the_making["Action"] == ["ec2:CreateTags"]
    assert in_the_making["Condition"] == {
        "StringEquals": {
            "ec2:CreateAction": [
                "CreateImage",
                "CreatePlacementGroup",
                "CreateSecurityGroup",
                "ImportKeyPair",
                "RunInstances",
            ]
        }
    }
    assert "ec2:CreateTags" in ours["Action"]


def test_the_policy_names_every_action_in_full(line: CommandLine) -> None:
    result = line.must("iam-policy")

    printed = json.loads(result.out)
    assert printed == build_policy()
    named = {action for statement in printed["Statement"] for action in statement["Action"]}
    assert named == set(_ACTIONS)
    assert len(_ACTIONS) == len(set(_ACTIONS))
    assert not any("*" in action for action in _ACTIONS)
    # Whoever has it changes nobody's permissions.
    assert {action.partition(":")[0] for action in _ACTIONS} == {"ec2", "servicequotas", "ssm"}
