"""Spot machines and their requests."""

from __future__ import annotations

from typing import Any

from tests.infra.local.fakes import FakeCloud, refusal, tags


def run_spot(cloud: FakeCloud, count: int = 1, **options: Any) -> list[str]:
    market = {"MarketType": "spot", "SpotOptions": options}
    specifications = tags("spot-instances-request", cluster="c")
    return cloud.run(count, InstanceMarketOptions=market, TagSpecifications=specifications)


def requests(cloud: FakeCloud, **filters: str) -> list[Any]:
    asked = [{"Name": n.replace("_", "-"), "Values": [v]} for n, v in filters.items()]
    answer = cloud.ec2.describe_spot_instance_requests(Filters=asked)
    return list(answer["SpotInstanceRequests"])


def test_every_spot_machine_has_a_request(fake_cloud: FakeCloud) -> None:
    ids = run_spot(fake_cloud, 2, MaxPrice="3.5", InstanceInterruptionBehavior="terminate")
    (ordinary,) = fake_cloud.run()
    found = requests(fake_cloud)
    assert [request["InstanceId"] for request in found] == ids
    first = found[0]
    assert first["SpotInstanceRequestId"].startswith("sir-")
    assert (first["State"], first["Status"]["Code"]) == ("active", "fulfilled")
    assert (first["SpotPrice"], first["Type"]) == ("3.5", "one-time")
    assert first["Tags"] == [{"Key": "cluster", "Value": "c"}]
    instance = fake_cloud.describe(ids[0])
    assert instance["InstanceLifecycle"] == "spot"
    assert instance["SpotInstanceRequestId"] == first["SpotInstanceRequestId"]
    assert "InstanceLifecycle" not in fake_cloud.describe(ordinary)


def test_requests_are_found_by_filters_and_ids(fake_cloud: FakeCloud) -> None:
    one, other = run_spot(fake_cloud, 2)
    fake_cloud.ec2.terminate_instances(InstanceIds=[other])
    assert len(requests(fake_cloud, tag_key="cluster")) == 2
    assert len(requests(fake_cloud, **{"tag:cluster": "other"})) == 0
    assert [r["InstanceId"] for r in requests(fake_cloud, instance_id=one)] == [one]
    assert [r["InstanceId"] for r in requests(fake_cloud, state="active")] == [one]
    (found,) = requests(fake_cloud, instance_id=one)
    ec2, ids = fake_cloud.ec2, [found["SpotInstanceRequestId"]]
    by_id = ec2.describe_spot_instance_requests(SpotInstanceRequestIds=ids)
    assert by_id["SpotInstanceRequests"] == [found]
    unknown = {"SpotInstanceRequestIds": ["sir-12345678"]}
    for call in (ec2.describe_spot_instance_requests, ec2.cancel_spot_instance_requests):
        assert refusal(call, **unknown) == "InvalidSpotInstanceRequestID.NotFound"


def test_a_request_is_closed_with_its_machine_or_canceled_before(fake_cloud: FakeCloud) -> None:
    closed, canceled = run_spot(fake_cloud, 2)
    (request,) = requests(fake_cloud, instance_id=canceled)
    ids = [request["SpotInstanceRequestId"]]
    answer = fake_cloud.ec2.cancel_spot_instance_requests(SpotInstanceRequestIds=ids)
    assert answer["CancelledSpotInstanceRequests"][0]["State"] == "cancelled"
    assert fake_cloud.state_of(canceled) == "running"
    (request,) = requests(fake_cloud, instance_id=canceled)
    assert request["Status"]["Code"] == "request-canceled-and-instance-running"
    fake_cloud.ec2.terminate_instances(InstanceIds=[closed, canceled])
    ended = {r["InstanceId"]: (r["State"], r["Status"]["Code"]) for r in requests(fake_cloud)}
    code = "instance-terminated-by-user"
    assert ended == {closed: ("closed", code), canceled: ("cancelled", code)}
