"""The contract test itself: it sees what it must see, and what the embedded cloud answers in a life."""

from __future__ import annotations

import json
import re
from typing import Any

import botocore.session
import pytest
from botocore.model import OperationModel

from infra.local.api.network import PlacementGroups
from tests.cluster.conftest import cloud
from tests.harness.contract import KNOWN_DEVIATIONS, Contract, require_announced, watching
from tests.harness.shapes import check_answer, check_request
from tests.harness.simulated_cloud import SimulatedCloud

__all__ = ["cloud"]

_SESSION = botocore.session.get_session()


def operation(service: str, name: str) -> OperationModel:
    return _SESSION.get_service_model(service).operation_model(name)


def instances(content: str, around: str = "DescribeInstancesResponse") -> bytes:
    return (
        f'<{around} xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"><requestId>r</requestId>'
        f"<reservationSet><item><instancesSet>{content}</instancesSet></item></reservationSet>"
        f"</{around}>"
    ).encode()


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("<ebsOptimized>true</ebsOptimized>", []),
        ("<launchTime>2026-01-01T00:00:00.000Z</launchTime>", []),
        ("<InstanceId>i-1</InstanceId>", ["InstanceId: unknown element"]),
        ("<ebsOptimized>True</ebsOptimized>", ["EbsOptimized: 'True' is no boolean"]),
        ("<amiLaunchIndex>first</amiLaunchIndex>", ["AmiLaunchIndex: 'first' is no integer"]),
        ("<launchTime>now</launchTime>", ["LaunchTime: 'now' is no iso8601 timestamp"]),
        ("<architecture>x87</architecture>", ["Architecture: 'x87' is not in its enum"]),
        ("<placement/><placement/>", ["Placement: repeated"]),
        ("<placement>here</placement>", ["Placement: text in a structure"]),
        ("<tagSet>none</tagSet>", ["Tags: text in a list"]),
    ],
)
def test_a_wrong_answer_of_ec2_is_seen(content: str, found: list[str]) -> None:
    model, at = operation("ec2", "DescribeInstances"), "Reservations[].Instances[]"
    seen = check_answer(model, 200, instances(f"<item>{content}</item>"))
    assert list(seen) == [f"{at}.{text}" for text in found]
    assert list(check_answer(model, 200, instances("<member/>"))) == [
        f"{at}: an element member, not item"
    ]


def test_the_frames_of_answers_and_errors_are_checked() -> None:
    model = operation("ec2", "DescribeInstances")
    assert list(check_answer(model, 200, instances("", "Answer"))) == [
        ": the root element is Answer"
    ]
    assert list(check_answer(model, 200, b"{}")) == [": the body is no XML"]
    flat = b"<Response><Error><Code>c</Code></Error><RequestID>r</RequestID></Response>"
    assert list(check_answer(model, 400, flat)) == [": no error at Response/Errors/Error"]
    mute = b"<Response><Errors><Error><Code>c</Code></Error></Errors></Response>"
    assert list(check_answer(model, 400, mute)) == [
        "Response/Errors/Error/Message: missing",
        "RequestID: missing",
    ]
    of_sts = operation("sts", "GetCallerIdentity")
    result = "<GetCallerIdentityResult><Account>1</Account><Boss>x</Boss></GetCallerIdentityResult>"
    whole = f"<GetCallerIdentityResponse>{result}<More/></GetCallerIdentityResponse>"
    assert list(check_answer(of_sts, 200, whole.encode())) == [
        "Boss: unknown element",
        "More: unknown element",
    ]
    assert ": no error at ErrorResponse/Error" in list(check_answer(of_sts, 403, flat))


def test_a_wrong_answer_in_json_is_seen() -> None:
    model = operation("service-quotas", "GetServiceQuota")
    quota: dict[str, Any] = {"Quota": {"Value": "8", "Adjustable": 1, "Colour": "red"}}
    assert list(check_answer(model, 200, json.dumps(quota).encode())) == [
        "Quota.Value: a str, not a double",
        "Quota.Adjustable: a int, not a boolean",
        "Quota.Colour: unknown member",
    ]
    assert list(check_answer(model, 400, b'{"message": "m"}')) == ["__type: missing"]
    assert list(check_answer(model, 400, b'{"__type": "T"}')) == ["message: missing"]
    assert list(check_answer(model, 400, b"[]")) == [": the error is no object"]


def test_a_wrong_request_is_seen() -> None:
    def check(name: str, service: str = "ec2", **sent: Any) -> list[str]:
        return list(check_request(operation(service, name), sent))

    colour = {"Name": "colour", "Values": ["red"]}
    assert check("DescribeInstances", InstanceIds=["i-1"], MaxResults=5) == []
    assert check("DescribeInstances", Filters=[colour]) == ["Filters: no filter 'colour'"]
    assert check("DescribeInstances", Filters=[{**colour, "Name": "tag:a"}]) == []
    assert check("DescribeVpcs", MaxResults=1) == ["MaxResults: 1 is outside its limits"]
    assert check("CreatePlacementGroup", Strategy="near") == ["Strategy: 'near' is not in its enum"]
    found = check("RunInstances", ElasticGpuSpecification=[])
    assert found == ["ElasticGpuSpecification: deprecated"]
    quota = check("GetServiceQuota", "service-quotas", ServiceCode="ec2", QuotaCode="!")
    assert quota == ["QuotaCode: '!' does not match [a-zA-Z][a-zA-Z0-9-]{1,128}"]


def test_what_a_life_deviates_in_is_known(cloud: SimulatedCloud) -> None:
    """An entry that no longer occurs has to go."""
    contract = Contract()
    with watching(contract):
        cloud.up(nodes=2, market="spot", instance_types=("c7i.metal-24xl", "c7i.16xlarge"))
        cloud.down()
        cloud.up(nodes=1, second_guard=True)
        cloud.down()

    require_announced(contract.drain(), list(KNOWN_DEVIATIONS))


@pytest.mark.breaks_contract("CreatePlacementGroup answer *: 'ready' is not in its enum")
def test_a_defect_of_the_embedded_cloud_is_seen(
    cloud: SimulatedCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = PlacementGroups.create

    def create_strangely(*args: Any) -> Any:
        group = create(*args)
        group.state = "ready"
        return group

    monkeypatch.setattr(PlacementGroups, "create", create_strangely)
    contract = Contract()
    with watching(contract):
        cloud.ec2.create_placement_group(GroupName="g", Strategy="cluster")
        cloud.ec2.create_placement_group(GroupName="h", Strategy="cluster")

    wrong = "CreatePlacementGroup answer PlacementGroup.State: 'ready' is not in its enum"
    assert contract.drain() == [wrong]
    assert contract.drain() == []
    with watching(Contract(strict=True)), pytest.raises(AssertionError, match="'ready'"):
        cloud.ec2.create_placement_group(GroupName="i", Strategy="cluster")


def test_a_violation_that_no_test_announces_is_a_failure() -> None:
    require_announced([], [])
    require_announced(["A answer x: wrong"], ["A answer *"])
    with pytest.raises(AssertionError, match="A answer x: wrong"):
        require_announced(["A answer x: wrong"], [])
    with pytest.raises(AssertionError, match=re.escape("B *")):
        require_announced(["A answer x: wrong"], ["A *", "B *"])
