"""``up`` from nothing: exactly what EC2 is asked for, and what is where in the end."""

from __future__ import annotations

import base64
import gzip
from datetime import timedelta
from typing import Any

import pytest

from cluster.nodes import find_cluster
from infra.ec2.key_pair import fingerprint, read_public
from infra.errors import UsageError
from infra.plan.actions import ActionKind
from provision.host_keys import pinned_host_keys
from tests.aws import tags_of
from tests.harness.simulated_cloud import SimulatedCloud
from tests.harness.simulated_machines import host_key_of

HOURS = timedelta(hours=1)


def test_up_asks_ec2_for_exactly_this(cloud: SimulatedCloud) -> None:
    cloud.be("instant")
    cluster = cloud.prepared(nodes=3)

    # Tags say that the head has its software, that the image is clean, and that the nodes are connected.
    assert cloud.writes() == [
        *("CreateSecurityGroup", "AuthorizeSecurityGroupIngress", "AuthorizeSecurityGroupEgress"),
        *("ImportKeyPair", "CreatePlacementGroup", "RunInstances", "CreateTags", "CreateImage"),
        *("CreateTags", "RunInstances", "CreateTags"),
    ]
    head, workers = cloud.purchases()
    assert (head["MinCount"], head["MaxCount"]) == (1, 1)
    assert (workers["MinCount"], workers["MaxCount"]) == (2, 2)
    assert workers["ImageId"] != head["ImageId"]
    assert [node.name for node in cluster.nodes] == ["node0", "node1", "node2"]
    assert len({node.instance.place for node in cluster.nodes}) == 1


def test_every_machine_is_asked_for_with_its_guards(cloud: SimulatedCloud) -> None:
    cloud.up(nodes=3, volume_gib=200, idle_timeout=timedelta(minutes=40))

    group = cloud.recorder.of("AuthorizeSecurityGroupIngress")[0]["GroupId"]
    owner = fingerprint(read_public(cloud.ctx.files.key))
    for role, request in zip(("head", "worker"), cloud.purchases(), strict=True):
        labels = tags_of(request)
        assert labels["instance"] == labels["volume"] == labels["network-interface"]
        expected = {
            "Name": f"bert-{role}",
            "spr-cluster:cluster": "bert",
            "spr-cluster:role": role,
            "spr-cluster:stack": "upstream",
            "spr-cluster:ranks": {"head": "0", "worker": "1-2"}[role],
            "spr-cluster:owner-key": owner,
            "spr-cluster:owner": "arn:aws:iam::123456789012:user/spr-cluster",
            "spr-cluster:expires": cloud.expires(8 * HOURS),
            "spr-cluster:latest": cloud.expires(8.5 * HOURS),
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
            "Throughput": 750,
            "Encrypted": True,
            "DeleteOnTermination": True,
        }
        (nic,) = request["NetworkInterfaces"]
        assert nic["Groups"] == [group]
        assert nic["DeleteOnTermination"] is True
        assert "ConnectionTrackingSpecification" not in nic
        assert request["InstanceInitiatedShutdownBehavior"] == "terminate"
        assert request["Placement"] == {"GroupName": "spr-cluster-bert"}
        assert "echo 2400 >/var/lib/cloud/instance/spr-cluster-idle" in user_data_of(request)


def user_data_of(request: dict[str, Any]) -> str:
    return gzip.decompress(base64.b64decode(request["UserData"])).decode()


def test_whatever_is_created_is_tagged_by_the_call_that_creates_it_and_stays(
    cloud: SimulatedCloud,
) -> None:
    cloud.be("instant")
    cloud.up(nodes=2, market="spot", max_price=3.0, idle_timeout=HOURS, volume_gib=50)

    creating = [
        (operation, params)
        for operation, params in cloud.recorder.calls
        if operation.startswith(("Create", "Run", "Import")) and operation != "CreateTags"
    ]
    assert len(creating) == 6
    for operation, params in creating:
        for kind, labels in tags_of(params).items():
            assert labels["spr-cluster:cluster"] == "bert", (operation, kind)
    asked = {kind for _, params in creating for kind in tags_of(params)}
    assert asked == {
        *("security-group", "key-pair", "placement-group", "instance", "volume"),
        *("network-interface", "spot-instances-request", "image", "snapshot"),
    }
    # Nothing exists that its tag does not show.
    found = cloud.found()
    assert sum(len(ids) for ids in found.ids().values()) == len(cloud.left())
    # Another `up` knows the options from the tags.
    plan = cloud.plan()
    assert [action.kind for action in plan.actions] == [ActionKind.VERIFY]
    assert not plan.buys


def test_the_private_key_stays_here_and_the_user_data_holds_no_secret(
    cloud: SimulatedCloud,
) -> None:
    cloud.prepared(nodes=2)

    files = cloud.ctx.files
    assert files.key.stat().st_mode & 0o777 == 0o600
    assert files.folder.stat().st_mode & 0o777 == 0o700
    assert "PRIVATE KEY" in files.key.read_text()
    assert "PRIVATE" not in str(cloud.recorder.calls)
    (imported,) = cloud.recorder.of("ImportKeyPair")
    assert imported["PublicKeyMaterial"].decode().startswith(read_public(files.key))
    for request in cloud.purchases():
        end = cloud.clock.now + 8 * 3600
        assert any(str(int(end) - late) in user_data_of(request) for late in range(300))


def test_a_cluster_is_found_again_by_its_tags_in_the_same_order(cloud: SimulatedCloud) -> None:
    made = cloud.prepared(nodes=3)
    config = cloud.ctx.files.ssh_config.read_text()
    before, steps = len(cloud.writes()), list(cloud.steps.done)

    found = cloud.cluster()

    assert [n.instance.id for n in found.nodes] == [n.instance.id for n in made.nodes]
    assert found.is_whole
    assert found.stack == "upstream"
    assert found.wanted_nodes == 3
    assert found.node("2").name == found.node("node2").name == "node2"
    for node in found.nodes:
        id_ = node.instance.id
        assert f"Host {node.name}\n    HostName {node.public_ip}\n    HostKeyAlias {id_}" in config
        assert pinned_host_keys(cloud.ctx.files.known_hosts, id_) == (host_key_of(id_),)
    with pytest.raises(UsageError, match="no 'node9' in cluster 'bert': it has node0 to node2"):
        found.node("node9")
    with pytest.raises(UsageError, match="no cluster 'other' is running in us-east-1"):
        find_cluster(cloud.ec2, cloud.ctx.cloud, "other", cloud.ctx.now())
    # The same again changes nothing and verifies.
    again = cloud.up(nodes=3)
    assert len(cloud.writes()) == before
    asked = ["# querying the health of all nodes", "# asking the queue"]
    assert cloud.steps.done[len(steps) :] == asked
    assert [n.instance.id for n in again.nodes] == [n.instance.id for n in made.nodes]
    for node in found.nodes:
        cloud.end(node.instance.id)
    cloud.clock.now += 26 * 3600
    with pytest.raises(UsageError, match=r"shut down at the end of its time to live, .* with all"):
        cloud.ctx.find_cluster()


def test_a_new_node_whose_probe_fails_is_replaced(cloud: SimulatedCloud) -> None:
    def damage() -> None:
        cloud.steps.before.clear()
        cloud.change_machine(cloud.cluster().nodes[1].instance.id, health={"disk_size": None})

    cloud.steps.before["health of all nodes"] = damage

    assert cloud.up(nodes=2).is_whole

    assert len(cloud.recorder.of("TerminateInstances")) == 1


@pytest.mark.parametrize("state", ["down*|Not responding", "idle*|none", "drained|by hand"])
def test_a_node_whose_queue_daemon_has_stopped_is_connected_again(
    cloud: SimulatedCloud, state: str
) -> None:
    first = cloud.prepared(nodes=2)
    steps = list(cloud.steps.done)
    cloud.change_machine(first.nodes[0].instance.id, queue={"node1": state})

    cloud.up(nodes=2)

    unpacked = [s for s in cloud.steps.done[len(steps) :] if 'tar -C "' in s]
    # A node that someone has drained stays out of the queue.
    assert len(unpacked) == (0 if state.startswith("drain") else 2)


def count_calls(cloud: SimulatedCloud, nodes: int) -> Any:
    """EC2's calls of a cold `up`, of the same again, of one with an image, and of `down`, by action."""
    calls = cloud.fake.application.calls
    counts = []
    for work in (
        lambda: cloud.up(nodes=nodes),
        lambda: cloud.up(nodes=nodes),
        lambda: cloud.down(keep_image=True),
        lambda: cloud.up(nodes=nodes),
        cloud.down,
    ):
        calls.clear()
        work()
        counts.append(dict(calls))
    assert cloud.left() == []
    return counts


def test_three_nodes_take_as_many_calls_as_two(cloud: SimulatedCloud) -> None:
    cloud.be("instant")
    few, many = count_calls(cloud, 2), count_calls(cloud, 3)

    assert many == few
    cold, again, _, warm, _ = (sum(counts.values()) for counts in few)
    assert cold <= 34
    assert again <= 8
    assert warm <= 26
