"""The order of offers, and the exact parameters of RunInstances."""

from __future__ import annotations

from dataclasses import replace

import pytest

from infra.ec2 import tags
from infra.ec2.network import TypeSupport
from infra.ec2.purchase import Offer, cheapest_zone_first, list_offers, render_request
from tests.infra.plan_inputs import make_image, make_spec
from tests.infra.price_market import AB, METAL, NETWORKS, SECOND, make_purchase, offers_of


def rendered(offers: tuple[Offer, ...]) -> list[str]:
    return [str(offer).replace("us-east-1", "") for offer in offers]


def test_spot_first_and_then_all_of_it_again_on_demand_if_that_is_allowed() -> None:
    own = [f"{SECOND} in b, in the placement group", f"{SECOND} in b"]
    spot = [f"{SECOND} in b, spot, in the placement group", f"{SECOND} in b, spot"]

    for market, offers in (("spot", spot), ("spot-or-on-demand", spot + own), ("on-demand", own)):
        spec = make_spec(2, instance_types=(SECOND,), market=market)
        assert rendered(offers_of(spec)) == offers


def test_on_spot_the_cheapest_zone_comes_first_and_one_without_a_price_last() -> None:
    spec = make_spec(2, instance_types=(METAL, SECOND), market="spot-or-on-demand")
    found = cheapest_zone_first(offers_of(spec), {(METAL, "us-east-1b"): 3.0})

    assert rendered(found)[:4] == [
        f"{METAL} in b, spot, in the placement group",
        f"{METAL} in a, spot, in the placement group",
        f"{METAL} in b, spot",
        f"{METAL} in a, spot",
    ]
    assert found[4:] == offers_of(spec)[4:]


@pytest.mark.parametrize("nodes", [1, 2])
def test_one_node_gets_a_placement_group_too_if_its_type_can_be_in_one(nodes: int) -> None:
    in_group = [offer.in_group for offer in offers_of(make_spec(nodes))]
    assert in_group == [True, True, False, False]
    assert not any(offer.in_group for offer in offers_of(make_spec(nodes, placement_group=False)))
    support = {METAL: TypeSupport(AB, cluster_groups=False)}
    assert not any(each.in_group for each in list_offers(make_spec(nodes), support, NETWORKS))


# The request


def test_the_request_of_a_plain_machine_is_exactly_this() -> None:
    in_group, *_, offer = offers_of(make_spec(2))
    known = {"Name": "bert-worker", tags.CLUSTER: "bert", tags.ROLE: "worker", tags.STACK: "intel"}
    labels = [{"Key": key, "Value": value} for key, value in known.items()]
    interface = {"DeviceIndex": 0, "SubnetId": "subnet-b", "Groups": ["sg-1"]}
    interface |= {"AssociatePublicIpAddress": True, "DeleteOnTermination": True}
    disk = {"VolumeSize": 100, "VolumeType": "gp3", "Encrypted": True, "DeleteOnTermination": True}
    tokens = {"HttpEndpoint": "enabled", "HttpTokens": "required", "HttpPutResponseHopLimit": 1}

    request = render_request(make_purchase(make_spec(2)), in_group)
    assert request.pop("Placement") == {"GroupName": "spr-cluster-bert"}
    assert request["NetworkInterfaces"][0]["SubnetId"] == "subnet-a"
    assert render_request(make_purchase(make_spec(2)), offer) == {
        "ImageId": "ami-1",
        "InstanceType": METAL,
        "MinCount": 2,
        "MaxCount": 2,
        "KeyName": "spr-cluster-bert",
        "UserData": b"#cloud-config\nFalse",
        "NetworkInterfaces": [interface],
        "BlockDeviceMappings": [{"DeviceName": "/dev/sda1", "Ebs": disk}],
        "MetadataOptions": tokens,
        "InstanceInitiatedShutdownBehavior": "terminate",
        "TagSpecifications": [
            {"ResourceType": kind, "Tags": labels}
            for kind in ("instance", "volume", "network-interface")
        ],
    }


@pytest.mark.parametrize(
    ("max_price", "ceiling"), [(None, {}), (2.5, {"MaxPrice": "2.5"}), (3, {"MaxPrice": "3"})]
)
def test_a_spot_machine_is_bought_once_with_its_ceiling_and_its_request_is_tagged(
    max_price: float | None, ceiling: dict[str, str]
) -> None:
    spec = make_spec(2, market="spot", max_price=max_price)

    request = render_request(make_purchase(spec), offers_of(spec)[0])

    once = {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"}
    options = {"MarketType": "spot", "SpotOptions": {**once, **ceiling}}
    assert request["InstanceMarketOptions"] == options
    kinds = [listed["ResourceType"] for listed in request["TagSpecifications"]]
    assert kinds == ["instance", "volume", "network-interface", "spot-instances-request"]


@pytest.mark.parametrize("supported", [True, False])
def test_ena_express_with_its_settings_if_the_type_supports_it(supported: bool) -> None:
    spec, support = make_spec(1), {METAL: TypeSupport(AB, ena_express=supported)}

    request = render_request(make_purchase(spec), list_offers(spec, support, NETWORKS)[0])

    (interface,) = request["NetworkInterfaces"]
    express = {"EnaSrdEnabled": True, "EnaSrdUdpSpecification": {"EnaSrdUdpEnabled": True}}
    assert interface.get("EnaSrdSpecification") == (express if supported else None)
    assert request["UserData"] == f"#cloud-config\n{supported}".encode()


def test_the_disk_has_the_requested_speed_and_room_for_the_image() -> None:
    spec = make_spec(2, volume_throughput=500, volume_iops=4000, volume_init_rate=200)
    image = replace(make_image(), volume_gib=150)

    request = render_request(make_purchase(spec, image=image), offers_of(spec)[0])

    ebs = request["BlockDeviceMappings"][0]["Ebs"]
    assert ebs["VolumeSize"] == 150
    assert (ebs["Throughput"], ebs["Iops"], ebs["VolumeInitializationRate"]) == (500, 4000, 200)
    assert spec.disk == "100 GiB encrypted gp3, 500 MiB/s, 4000 IOPS"
