"""``up`` from nothing: exactly what EC2 is asked for, and what is where in the end."""

from __future__ import annotations

import base64
import gzip
from datetime import timedelta
from typing import Any

import pytest

from cluster.local_files import remembered_cloud
from cluster.nodes import find_cluster
from infra.ec2.key_pair import fingerprint, read_public
from infra.errors import HostError, SprError, UsageError
from infra.plan.actions import ActionKind
from provision.host_keys import pinned_host_keys
from tests.aws import tags_of
from tests.harness.cloud import CALLER
from tests.harness.simulated_cloud import SimulatedCloud
from tests.harness.simulated_machines import host_key_of

HOURS = timedelta(hours=1)


def test_up_asks_ec2_for_exactly_this(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.be("instant")
    cluster = simulated_cloud.prepared(nodes=3)

    assert simulated_cloud.writes() == [
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
    head, workers = simulated_cloud.purchases()
    assert (head["MinCount"], head["MaxCount"]) == (1, 1)
    assert (workers["MinCount"], workers["MaxCount"]) == (2, 2)
    assert workers["ImageId"] != head["ImageId"]
    assert [node.name for node in cluster.nodes] == ["node0", "node1", "node2"]
    assert len({node.instance.place for node in cluster.nodes}) == 1


def test_every_machine_is_asked_for_with_its_guards(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.up(nodes=3, volume_gib=200)

    group = simulated_cloud.recorder.of("AuthorizeSecurityGroupIngress")[0]["GroupId"]
    owner = fingerprint(read_public(simulated_cloud.ctx.files.key))
    for role, request in zip(("head", "worker"), simulated_cloud.purchases(), strict=True):
        labels = tags_of(request)
        assert labels["instance"] == labels["volume"] == labels["network-interface"]
        expected = {
            "Name": f"bert-{role}",
            "spr-cluster:cluster": "bert",
            "spr-cluster:role": role,
            "spr-cluster:stack": "upstream",
            "spr-cluster:owner-key": owner,
            "spr-cluster:owner": "arn:aws:iam::123456789012:user/spr-cluster",
            "spr-cluster:expires": simulated_cloud.expires(8 * HOURS),
            "spr-cluster:latest": simulated_cloud.expires(8.5 * HOURS),
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


def test_whatever_is_created_is_tagged_by_the_call_that_creates_it(
    simulated_cloud: SimulatedCloud,
) -> None:
    simulated_cloud.be("instant")
    simulated_cloud.up(nodes=2, market="spot")

    creating = [
        (operation, params)
        for operation, params in simulated_cloud.recorder.calls
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
    found = simulated_cloud.found()
    assert sum(len(ids) for ids in found.ids().values()) == len(simulated_cloud.left())


def test_the_security_group_lets_in_ssh_from_the_caller_and_the_cluster_itself(
    simulated_cloud: SimulatedCloud,
) -> None:
    simulated_cloud.prepared(nodes=1)

    group = simulated_cloud.found("security_groups").group
    assert group is not None
    assert group.is_open_as([CALLER], CALLER)
    assert group.ssh_cidrs == (CALLER,)


def test_one_node_needs_no_image(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.prepared(nodes=1)

    assert "CreateImage" not in simulated_cloud.writes()
    assert len(simulated_cloud.purchases()) == 1


def test_no_placement_group_if_disabled(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.up(nodes=2, placement_group=False)

    assert "CreatePlacementGroup" not in simulated_cloud.writes()
    assert all("Placement" not in r for r in simulated_cloud.purchases())


def test_the_private_key_stays_here_and_the_user_data_holds_no_secret(
    simulated_cloud: SimulatedCloud,
) -> None:
    simulated_cloud.prepared(nodes=2)

    files = simulated_cloud.ctx.files
    assert files.key.stat().st_mode & 0o777 == 0o600
    assert files.folder.stat().st_mode & 0o777 == 0o700
    assert "PRIVATE KEY" in files.key.read_text()
    assert "PRIVATE" not in str(simulated_cloud.recorder.calls)
    (imported,) = simulated_cloud.recorder.of("ImportKeyPair")
    assert imported["PublicKeyMaterial"].decode().startswith(read_public(files.key))
    for request in simulated_cloud.purchases():
        user_data = gzip.decompress(base64.b64decode(request["UserData"])).decode()
        end = simulated_cloud.clock.now + 8 * 3600
        assert any(str(int(end) - late) in user_data for late in range(300))


def test_the_idle_guard_is_in_the_user_data_if_requested(
    simulated_cloud: SimulatedCloud,
) -> None:
    simulated_cloud.up(nodes=1, idle_timeout=timedelta(minutes=40))

    (request,) = simulated_cloud.purchases()
    user_data = gzip.decompress(base64.b64decode(request["UserData"])).decode()
    assert "idle_timeout=2400" in user_data


def test_the_image_is_made_while_the_heads_identity_is_sealed(
    simulated_cloud: SimulatedCloud,
) -> None:
    order: list[str] = []
    simulated_cloud.steps.before["sealing"] = lambda: order.append("seal")
    simulated_cloud.steps.before["unseal"] = lambda: order.append("unseal")
    simulated_cloud.fake.application.on_call = lambda action, moment: (
        order.append(action) if moment == "before" and action in ("CreateImage",) else None
    )

    simulated_cloud.up(nodes=2)

    assert order == ["seal", "CreateImage", "unseal"]
    assert not (simulated_cloud.machines.root / "defect").exists()
    (image,) = simulated_cloud.found("images").images
    assert image.tags["spr-cluster:sealed"] == "yes"


def test_the_head_alone_gets_its_software_and_the_workers_have_it_from_the_image(
    simulated_cloud: SimulatedCloud,
) -> None:
    cluster = simulated_cloud.prepared(nodes=3)

    assert simulated_cloud.steps.count("install.sh") == 1
    machines = [simulated_cloud.machine(node.instance.id) for node in cluster.nodes]
    assert len({machine["installed"] for machine in machines}) == 1
    assert len({machine["mesh"] for machine in machines}) == 1
    names = {node.name: node.private_ip for node in cluster.nodes}
    assert all(machine["names"] == names for machine in machines)


def test_this_machine_knows_the_nodes_by_their_keys_and_names(
    simulated_cloud: SimulatedCloud,
) -> None:
    cluster = simulated_cloud.prepared(nodes=2)

    config = simulated_cloud.ctx.files.ssh_config.read_text()
    for node in cluster.nodes:
        id_ = node.instance.id
        assert f"Host {node.name}\n    HostName {node.public_ip}\n    HostKeyAlias {id_}" in config
        assert pinned_host_keys(simulated_cloud.ctx.files.known_hosts, id_) == (host_key_of(id_),)
    assert remembered_cloud("bert") == ("local", "us-east-1")
    assert remembered_cloud("other") is None


def test_a_cluster_is_found_again_by_its_tags_in_the_same_order(
    simulated_cloud: SimulatedCloud,
) -> None:
    made = simulated_cloud.prepared(nodes=4)

    found = simulated_cloud.cluster()

    assert [n.instance.id for n in found.nodes] == [n.instance.id for n in made.nodes]
    assert found.is_whole
    assert found.stack == "upstream"
    assert found.wanted_nodes == 4
    assert found.node("2").name == found.node("node2").name == "node2"
    with pytest.raises(UsageError, match="no 'node9' in cluster 'bert': it has node0 to node3"):
        found.node("node9")
    with pytest.raises(UsageError, match="no cluster 'other' is running in us-east-1"):
        find_cluster(simulated_cloud.ec2, "other")


def test_a_cluster_whose_time_is_over_says_so(simulated_cloud: SimulatedCloud) -> None:
    for instance in simulated_cloud.prepared(nodes=2).nodes:
        simulated_cloud.end(instance.instance.id)
    simulated_cloud.clock.now += 26 * 3600
    with pytest.raises(UsageError, match=r"shut down at the end of its time to live, .* with all"):
        simulated_cloud.ctx.find_cluster()


def test_the_same_again_changes_nothing_and_verifies(simulated_cloud: SimulatedCloud) -> None:
    first = simulated_cloud.prepared(nodes=3)
    before, steps = len(simulated_cloud.writes()), list(simulated_cloud.steps.done)

    again = simulated_cloud.up(nodes=3)

    assert len(simulated_cloud.writes()) == before
    asked = ["# querying the health of all nodes", "# asking the queue"]
    assert simulated_cloud.steps.done[len(steps) :] == asked
    assert [n.instance.id for n in again.nodes] == [n.instance.id for n in first.nodes]


@pytest.mark.parametrize("state", ["down*|Not responding", "idle*|none", "drained|by hand"])
def test_a_node_whose_queue_daemon_has_stopped_is_connected_again(
    simulated_cloud: SimulatedCloud, state: str
) -> None:
    first = simulated_cloud.prepared(nodes=2)
    steps = list(simulated_cloud.steps.done)
    simulated_cloud.change_machine(first.nodes[0].instance.id, queue={"node1": state})

    simulated_cloud.up(nodes=2)

    unpacked = [s for s in simulated_cloud.steps.done[len(steps) :] if 'tar -C "' in s]
    # A node that someone has drained stays out of the queue.
    assert len(unpacked) == (0 if state.startswith("drain") else 2)


def test_up_without_options_keeps_the_cluster_as_it_is(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.up(nodes=2, market="spot", max_price=3.0, idle_timeout=HOURS, volume_gib=50)

    plan = simulated_cloud.plan()

    assert [action.kind for action in plan.actions] == [ActionKind.VERIFY]
    assert not plan.buys


def test_a_node_without_amx_stops_up_before_anything_is_installed(
    simulated_cloud: SimulatedCloud,
) -> None:
    simulated_cloud.faults('[[machine]]\nfate = "no-amx"\n')

    with pytest.raises(
        HostError, match=r"\[node0\] no AMX: Xeon lacks amx_bf16, amx_int8, amx_tile"
    ):
        simulated_cloud.up(nodes=2)
    assert simulated_cloud.steps.count("install.sh") == 0
    assert len(simulated_cloud.found("instances").instances) == 1


def test_nodes_without_amx_are_accepted_where_the_user_says_so(
    simulated_cloud: SimulatedCloud,
) -> None:
    simulated_cloud.faults('[[machine]]\nfate = "no-amx"\n')

    cluster = simulated_cloud.up(nodes=2, amx_required=False)

    assert len(cluster.nodes) == 2
    assert "0 with AMX" in simulated_cloud.progress.notes[-1]


def test_a_time_to_live_that_is_over_buys_nothing_more(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.faults("image_s = 4000")
    simulated_cloud.clock.pace = 10

    with pytest.raises(SprError, match="time to live ended before the worker nodes"):
        simulated_cloud.up(nodes=2, ttl=HOURS)
    assert len(simulated_cloud.purchases()) == 1


def test_a_failed_installation_can_go_on(simulated_cloud: SimulatedCloud) -> None:
    def fail() -> None:
        raise HostError("node0", "no space left on device")

    simulated_cloud.steps.before["install.sh"] = fail
    with pytest.raises(HostError, match="no space left on device"):
        simulated_cloud.up(nodes=2)
    simulated_cloud.steps.before.clear()
    bought = len(simulated_cloud.purchases())

    cluster = simulated_cloud.up(nodes=2)

    assert len(cluster.nodes) == 2
    assert simulated_cloud.cluster().is_whole
    assert len(simulated_cloud.purchases()) == bought + 1


def count_calls(simulated_cloud: SimulatedCloud, nodes: int) -> Any:
    """EC2's calls of a cold `up`, of the same again, of one with an image, and of `down`, by action."""
    calls = simulated_cloud.fake.application.calls
    counts = []
    for work in (
        lambda: simulated_cloud.up(nodes=nodes),
        lambda: simulated_cloud.up(nodes=nodes),
        lambda: simulated_cloud.down(keep_image=True),
        lambda: simulated_cloud.up(nodes=nodes),
        simulated_cloud.down,
    ):
        calls.clear()
        work()
        counts.append(dict(calls))
    assert simulated_cloud.left() == []
    return counts


def test_twenty_nodes_take_as_many_calls_as_two(simulated_cloud: SimulatedCloud) -> None:
    simulated_cloud.be("instant")
    few, many = count_calls(simulated_cloud, 2), count_calls(simulated_cloud, 20)

    assert many == few
    cold, again, _, warm, _ = (sum(counts.values()) for counts in few)
    assert cold <= 31
    assert again <= 8
    assert warm <= 26
