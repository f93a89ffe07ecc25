"""``up`` from nothing: exactly what EC2 is asked for, and what is where in the end."""

from __future__ import annotations

import base64
from datetime import timedelta
from typing import Any

import pytest

from cluster.local_files import remembered_cloud
from cluster.nodes import find_cluster
from infra.actions import ActionKind
from infra.errors import HostError, SprError, UsageError
from infra.key_pair import read_public
from provision.host_keys import pinned_host_keys
from tests.aws import tags_of
from tests.harness.cloud import CALLER
from tests.harness.simulated_cloud import ParkCloud
from tests.harness.simulated_machines import host_key_of

HOURS = timedelta(hours=1)


def test_up_asks_ec2_for_exactly_this(park_cloud: ParkCloud) -> None:
    cluster = park_cloud.made(nodes=3)

    assert park_cloud.writes() == [
        "CreateSecurityGroup",
        "AuthorizeSecurityGroupIngress",
        "AuthorizeSecurityGroupEgress",
        "ImportKeyPair",
        "CreatePlacementGroup",
        "RunInstances",
        "CreateTags",  # the head has its software
        "CreateImage",
        "CreateTags",  # the image is clean
        "RunInstances",
        "CreateTags",  # the nodes are connected
    ]
    head, workers = park_cloud.recorder.of("RunInstances")
    assert (head["MinCount"], head["MaxCount"]) == (1, 1)
    assert (workers["MinCount"], workers["MaxCount"]) == (2, 2)
    assert workers["ImageId"] != head["ImageId"]
    assert [node.name for node in cluster.nodes] == ["node0", "node1", "node2"]
    assert len({node.instance.place for node in cluster.nodes}) == 1


def test_every_machine_is_asked_for_with_its_guards(park_cloud: ParkCloud) -> None:
    park_cloud.up(nodes=3, volume_gib=200)

    group = park_cloud.recorder.of("AuthorizeSecurityGroupIngress")[0]["GroupId"]
    for role, request in zip(
        ("head", "worker"), park_cloud.recorder.of("RunInstances"), strict=True
    ):
        labels = tags_of(request)
        assert labels["instance"] == labels["volume"] == labels["network-interface"]
        expected = {
            "Name": f"bert-{role}",
            "spr-cluster:cluster": "bert",
            "spr-cluster:role": role,
            "spr-cluster:stack": "upstream",
            "spr-cluster:expires": park_cloud.expires(8 * HOURS),
        }
        installed = labels["instance"].pop("spr-cluster:installed", "")
        assert labels["instance"] == expected
        assert bool(installed) is (role == "worker")
        assert request["InstanceType"] == "r7iz.metal-16xl"
        assert request["KeyName"] == "spr-cluster-bert"
        assert request["MetadataOptions"]["HttpTokens"] == "required"
        (disk,) = request["BlockDeviceMappings"]
        assert disk["Ebs"] == {
            "VolumeSize": 200,
            "VolumeType": "gp3",
            "Encrypted": True,
            "DeleteOnTermination": True,
        }
        (nic,) = request["NetworkInterfaces"]
        assert nic["Groups"] == [group]
        assert nic["DeleteOnTermination"] is True
        assert request["InstanceInitiatedShutdownBehavior"] == "terminate"
        assert request["Placement"] == {"GroupName": "spr-cluster-bert"}


def test_whatever_is_created_is_tagged_by_the_call_that_creates_it(park_cloud: ParkCloud) -> None:
    park_cloud.up(nodes=2, spot=True)

    creating = [
        (operation, params)
        for operation, params in park_cloud.recorder.calls
        if operation.startswith(("Create", "Run", "Import")) and operation != "CreateTags"
    ]
    assert len(creating) == 6
    for operation, params in creating:
        for kind, labels in tags_of(params).items():
            assert labels["spr-cluster:cluster"] == "bert", (operation, kind)
    asked = {kind for _, params in creating for kind in tags_of(params)}
    assert asked == {
        "security-group",
        "key-pair",
        "placement-group",
        "instance",
        "volume",
        "network-interface",
        "spot-instances-request",
        "image",
        "snapshot",
    }
    # Nothing exists that its tag does not show.
    found = park_cloud.found()
    assert sum(len(ids) for ids in found.ids().values()) == len(park_cloud.left())


def test_the_security_group_lets_in_ssh_from_the_caller_and_the_cluster_itself(
    park_cloud: ParkCloud,
) -> None:
    park_cloud.made(nodes=1)

    group = park_cloud.found("security_groups").group
    assert group is not None
    assert group.is_open_as(CALLER)
    assert group.ssh_cidrs == (CALLER,)


def test_one_node_needs_no_image_and_no_placement_group(park_cloud: ParkCloud) -> None:
    park_cloud.made(nodes=1)

    assert not {"CreateImage", "CreatePlacementGroup"} & set(park_cloud.writes())
    assert len(park_cloud.recorder.of("RunInstances")) == 1


def test_no_placement_group_where_none_is_wished(park_cloud: ParkCloud) -> None:
    park_cloud.up(nodes=2, placement_group=False)

    assert "CreatePlacementGroup" not in park_cloud.writes()
    assert all("Placement" not in r for r in park_cloud.recorder.of("RunInstances"))


def test_the_private_key_stays_here_and_the_user_data_holds_no_secret(
    park_cloud: ParkCloud,
) -> None:
    park_cloud.made(nodes=2)

    files = park_cloud.ctx.files
    assert files.key.stat().st_mode & 0o777 == 0o600
    assert files.folder.stat().st_mode & 0o777 == 0o700
    assert "PRIVATE KEY" in files.key.read_text()
    assert "PRIVATE" not in str(park_cloud.recorder.calls)
    (imported,) = park_cloud.recorder.of("ImportKeyPair")
    assert imported["PublicKeyMaterial"].decode().startswith(read_public(files.key))
    for request in park_cloud.recorder.of("RunInstances"):
        user_data = base64.b64decode(request["UserData"]).decode()
        end = park_cloud.clock.now + 8 * 3600
        assert any(str(int(end) - late) in user_data for late in range(300))


def test_the_idle_guard_is_in_the_user_data_where_it_is_wished(park_cloud: ParkCloud) -> None:
    park_cloud.up(nodes=1, idle_timeout=timedelta(minutes=40))

    (request,) = park_cloud.recorder.of("RunInstances")
    assert "idle_timeout=2400" in base64.b64decode(request["UserData"]).decode()


def test_the_image_is_made_while_the_heads_identity_is_off_its_disk(
    park_cloud: ParkCloud,
) -> None:
    order: list[str] = []
    park_cloud.steps.before["sealing"] = lambda: order.append("seal")
    park_cloud.steps.before["unseal"] = lambda: order.append("unseal")
    park_cloud.fake.application.on_call = lambda action, moment: (
        order.append(action) if moment == "before" and action in ("CreateImage",) else None
    )

    park_cloud.up(nodes=2)

    assert order == ["seal", "CreateImage", "unseal"]
    assert not (park_cloud.park.root / "defect").exists()
    (image,) = park_cloud.found("images").images
    assert image.tags["spr-cluster:sealed"] == "yes"


def test_the_head_alone_gets_its_software_and_the_workers_have_it_from_the_image(
    park_cloud: ParkCloud,
) -> None:
    cluster = park_cloud.made(nodes=3)

    assert park_cloud.steps.count("install.sh") == 1
    machines = [park_cloud.machine(node.instance.id) for node in cluster.nodes]
    assert len({machine["installed"] for machine in machines}) == 1
    assert len({machine["mesh"] for machine in machines}) == 1
    names = {node.name: node.private_ip for node in cluster.nodes}
    assert all(machine["names"] == names for machine in machines)


def test_this_machine_knows_the_nodes_by_their_keys_and_names(park_cloud: ParkCloud) -> None:
    cluster = park_cloud.made(nodes=2)

    config = park_cloud.ctx.files.ssh_config.read_text()
    for node in cluster.nodes:
        id_ = node.instance.id
        assert f"Host {node.name}\n    HostName {node.public_ip}\n    HostKeyAlias {id_}" in config
        assert pinned_host_keys(park_cloud.ctx.files.known_hosts, id_) == (host_key_of(id_),)
    assert remembered_cloud("bert") == ("local", "us-east-1")
    assert remembered_cloud("other") is None


def test_a_cluster_is_found_again_by_its_tags_in_the_same_order(park_cloud: ParkCloud) -> None:
    made = park_cloud.made(nodes=4)

    found = park_cloud.cluster()

    assert [n.instance.id for n in found.nodes] == [n.instance.id for n in made.nodes]
    assert found.is_whole
    assert found.stack == "upstream"
    assert found.wanted_nodes == 4
    assert found.node("2").name == found.node("node2").name == "node2"
    with pytest.raises(UsageError, match="no 'node9' in cluster 'bert': it has node0 to node3"):
        found.node("node9")
    with pytest.raises(UsageError, match="no cluster 'other' is running in us-east-1"):
        find_cluster(park_cloud.ec2, "other")


def test_the_same_again_changes_nothing_and_verifies(park_cloud: ParkCloud) -> None:
    first = park_cloud.made(nodes=3)
    before, steps = len(park_cloud.writes()), list(park_cloud.steps.done)

    again = park_cloud.up(nodes=3)

    assert len(park_cloud.writes()) == before
    assert park_cloud.steps.done[len(steps) :] == ["xargs -P 64"]
    assert [n.instance.id for n in again.nodes] == [n.instance.id for n in first.nodes]


def test_up_without_a_wish_keeps_the_cluster_as_it_is(park_cloud: ParkCloud) -> None:
    park_cloud.up(nodes=2, spot=True, max_price=3.0, idle_timeout=HOURS, volume_gib=50)

    plan = park_cloud.plan()

    assert [action.kind for action in plan.actions] == [ActionKind.VERIFY]
    assert not plan.buys


def test_a_node_without_amx_stops_up_before_anything_is_installed(park_cloud: ParkCloud) -> None:
    park_cloud.faults('[[machine]]\nfate = "no-amx"\n')

    with pytest.raises(
        HostError, match=r"\[node0\] no AMX: Xeon lacks amx_bf16, amx_int8, amx_tile"
    ):
        park_cloud.up(nodes=2)
    assert park_cloud.steps.count("install.sh") == 0
    assert len(park_cloud.found("instances").instances) == 1


def test_nodes_without_amx_are_accepted_where_the_user_says_so(park_cloud: ParkCloud) -> None:
    park_cloud.faults('[[machine]]\nfate = "no-amx"\n')

    cluster = park_cloud.up(nodes=2, amx_required=False)

    assert len(cluster.nodes) == 2
    assert "0 have AMX" in park_cloud.notes.told[-1]


def test_a_time_to_live_that_is_over_buys_nothing_more(park_cloud: ParkCloud) -> None:
    park_cloud.faults("image_s = 4000")
    park_cloud.clock.pace = 10

    with pytest.raises(SprError, match="time to live is over before the worker nodes"):
        park_cloud.up(nodes=2, ttl=HOURS)
    assert len(park_cloud.recorder.of("RunInstances")) == 1


def test_a_failed_installation_can_go_on(park_cloud: ParkCloud) -> None:
    def fail() -> None:
        raise HostError("node0", "no space left on device")

    park_cloud.steps.before["install.sh"] = fail
    with pytest.raises(HostError, match="no space left on device"):
        park_cloud.up(nodes=2)
    park_cloud.steps.before.clear()
    bought = len(park_cloud.recorder.of("RunInstances"))

    cluster = park_cloud.up(nodes=2)

    assert len(cluster.nodes) == 2
    assert park_cloud.cluster().is_whole
    assert len(park_cloud.recorder.of("RunInstances")) == bought + 1


def count_calls(park_cloud: ParkCloud, nodes: int) -> Any:
    """EC2's calls of a cold `up`, of the same again, and of `down`, by action."""
    calls = park_cloud.fake.application.calls
    counts = []
    for work in (
        lambda: park_cloud.up(nodes=nodes),
        lambda: park_cloud.up(nodes=nodes),
        park_cloud.down,
    ):
        calls.clear()
        work()
        counts.append(dict(calls))
    assert park_cloud.left() == []
    return counts


def test_twenty_nodes_take_as_many_calls_as_two(park_cloud: ParkCloud) -> None:
    few, many = count_calls(park_cloud, 2), count_calls(park_cloud, 20)

    assert many == few
    cold, warm, _ = (sum(counts.values()) for counts in few)
    assert cold <= 30
    assert warm <= 8
