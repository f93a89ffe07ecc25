"""``down``: whatever state a cluster is in, nothing is left of it, and that is proven."""

from __future__ import annotations

import pytest
from botocore.exceptions import ClientError

from cluster.local_files import remembered_cloud
from infra.ec2 import tags
from infra.ec2.inventory import Inventory
from infra.errors import SprError
from tests.harness.simulated_cloud import SimulatedCloud
from tests.infra.resource_factory import KINDS, ResourceFactory


class StopError(Exception):
    """An `up` that ends here, as if it had been killed."""


def stop_at(cloud: SimulatedCloud, action: str, moment: str) -> None:
    """End `up` around an EC2 call; what was asked for before it exists."""

    def tell(name: str, when: str) -> None:
        if (name, when) == (action, moment):
            cloud.fake.application.on_call = None
            raise StopError

    cloud.fake.application.on_call = tell


def test_down_ends_machines_first_leaves_nothing_and_says_what_there_was(
    cloud: SimulatedCloud,
) -> None:
    cloud.prepared(nodes=2)
    machines, before = cloud.found("instances").ids()["instances"], len(cloud.writes())

    removed = cloud.down()

    assert cloud.left() == []
    assert not removed.kept
    assert set(removed.ids) >= {"instances", "security_groups", "key_pairs", "images", "snapshots"}
    assert removed.ids["instances"] == sorted(machines)
    assert not cloud.ctx.files.exist
    order = cloud.writes()[before:]
    (terminate,) = cloud.recorder.of("TerminateInstances")
    assert len(terminate["InstanceIds"]) == 2
    assert order.index("TerminateInstances") < order.index("DeleteSecurityGroup")
    assert order.index("TerminateInstances") < order.index("DeletePlacementGroup")
    assert order.index("DeregisterImage") < order.index("DeleteSnapshot")

    before, again = len(cloud.writes()), cloud.down()
    assert (again.ids, len(cloud.writes())) == ({}, before)
    assert not again.kept


def test_it_works_from_any_machine_and_in_any_state(cloud: SimulatedCloud) -> None:
    cloud.down()
    assert cloud.writes() == []
    assert len(cloud.recorder.of("DescribeInstances")) == 1, "without a trace, one look is enough"
    cloud.prepared(nodes=2)
    cloud.end(cloud.cluster().head.instance.id)
    cloud.ec2.stop_instances(InstanceIds=[cloud.found("instances").alive[0].id])
    cloud.ctx.files.remove()

    cloud.down()

    assert cloud.left() == []


def test_everything_with_the_tag_is_removed_and_nothing_else(cloud: SimulatedCloud) -> None:
    cloud.be("instant")
    cloud.prepared(nodes=1)
    ours = ResourceFactory(cloud.fake, "bert")
    others = ResourceFactory(cloud.fake, "other")
    made = {kind: make(ours) for kind, make in KINDS.items()}
    foreign = {make(others) for make in KINDS.values()}

    removed = cloud.down()

    for kind, id_ in made.items():
        assert id_ in removed.ids[kind]
    left = set(cloud.left())
    assert not left & set(made.values())
    assert foreign <= left


def test_a_volume_that_a_foreign_machine_uses_is_waited_for_and_then_named(
    cloud: SimulatedCloud,
) -> None:
    cloud.be("instant")
    cloud.prepared(nodes=1)
    (stranger,) = cloud.fake.run(1)
    volume = cloud.fake.describe(stranger)["BlockDeviceMappings"][0]["Ebs"]["VolumeId"]
    cloud.ec2.create_tags(Resources=[volume], Tags=[{"Key": tags.CLUSTER, "Value": "bert"}])
    cloud.clock.pace = 200

    with pytest.raises(SprError, match=rf"still there after `down`: 1 volume \({volume}\)") as it:
        cloud.down()
    assert "spr-cluster down --name bert" in str(it.value)
    assert "VolumeInUse" in str(it.value)
    assert cloud.fake.state_of(stranger) == "running"
    assert cloud.ctx.files.exist

    cloud.ec2.terminate_instances(InstanceIds=[stranger])
    cloud.down()
    assert cloud.left() == []


def test_machines_that_do_not_end_are_named_in_time(cloud: SimulatedCloud) -> None:
    cloud.prepared(nodes=1)
    machine = cloud.cluster().head.instance.id
    cloud.faults("terminate_s = 80000")
    cloud.clock.pace = 60
    began = cloud.clock.now

    with pytest.raises(SprError, match=r"still there after `down`: 1 instance") as caught:
        cloud.down()
    assert f"termination of {machine} timed out after 20 min" in str(caught.value)
    assert 5400 < cloud.clock.now - began < 9000


def test_ec2_may_let_go_late_and_answers_may_be_lost(cloud: SimulatedCloud) -> None:
    cloud.prepared(nodes=2)
    denied = "code = 'UnauthorizedOperation'\ntimes = 9\n"
    cloud.faults(f"[[error]]\naction = 'DeleteSecurityGroup'\n{denied}")
    with pytest.raises(ClientError, match="UnauthorizedOperation"):
        cloud.down()  # a second denial is an error
    cloud.faults("")
    cloud.up(nodes=2)
    held = (
        ("DeleteSecurityGroup", "DependencyViolation"),
        ("DeleteSnapshot", "InvalidSnapshot.InUse"),
        ("DeletePlacementGroup", "InvalidPlacementGroup.InUse"),
    )
    faults = [f'action = "{action}"\ncode = "{code}"\ntimes = 3\n' for action, code in held]
    for action in ("TerminateInstances", "DeregisterImage", "DeleteKeyPair"):
        faults.append(f'action = "{action}"\neffect = true\n')
    cloud.faults("".join(f"[[error]]\n{fault}" for fault in faults))

    cloud.down()

    assert cloud.left() == []


@pytest.mark.parametrize("action", ["CreateSecurityGroup", "RunInstances"])
def test_what_shows_up_late_is_found(cloud: SimulatedCloud, action: str) -> None:
    """An `up` was killed as EC2 had just begun to make something that it does not show yet."""
    cloud.faults("visibility_s = 4.5")
    stop_at(cloud, action, "after")
    with pytest.raises(StopError):
        cloud.up(nodes=2)
    assert len(cloud.left()) > sum(len(i) for i in cloud.found().ids().values())

    cloud.down()

    assert cloud.left() == []
    assert not cloud.ctx.files.exist


@pytest.mark.parametrize(("minutes", "ends"), [(80, True), (200, False)])
def test_a_snapshot_in_progress_is_deleted_when_it_is_complete(
    cloud: SimulatedCloud, minutes: int, ends: bool
) -> None:
    cloud.faults(f"image_s = {minutes * 60}\n")
    cloud.up(nodes=1, bake="none")
    (snapshot,) = cloud.found("snapshots").snapshots
    cloud.clock.pace = 60

    if ends:
        cloud.down()
        assert cloud.left() == []
    else:
        with pytest.raises(SprError, match=r"still there after `down`: 1 snapshot \(snap-") as it:
            cloud.down()
        assert f"the copy of snapshot {snapshot.id} timed out after 1 h 30 min" in str(it.value)
    note = "EC2 deletes a snapshot in progress when it is complete: "
    assert any(text.startswith(note) for text in cloud.progress.notes)


# An image that is kept


def test_down_can_keep_the_image(cloud: SimulatedCloud) -> None:
    cloud.prepared(nodes=2)
    (image,) = cloud.found("images").images

    removed = cloud.down(keep_image=True)

    assert set(removed.kept.ids()) == {"images", "snapshots"}
    assert sorted(cloud.left()) == sorted([image.id, *image.snapshot_ids])
    assert cloud.found("images").images[0].tags[tags.KEPT] == "yes"
    assert not cloud.ctx.files.key.exists()
    assert remembered_cloud("bert") == ("local", "us-east-1")

    again = cloud.down()
    assert again.ids["images"] == [image.id]
    assert cloud.left() == []
    assert remembered_cloud("bert") is None


def test_there_may_be_no_image_to_keep(cloud: SimulatedCloud) -> None:
    cloud.be("instant")
    cloud.prepared(nodes=1)
    of_no_image = ResourceFactory(cloud.fake, "bert").snapshots()

    assert cloud.down(keep_image=True).kept == Inventory()
    assert cloud.found() == Inventory()
    assert of_no_image not in cloud.left()


@pytest.mark.parametrize("region", ["eu-west-1", "us-east-1"], ids=["elsewhere", "not listed"])
def test_the_key_of_a_cluster_that_this_did_not_see_is_left_alone(
    cloud: SimulatedCloud, monkeypatch: pytest.MonkeyPatch, region: str
) -> None:
    cloud.prepared(nodes=1)
    (cloud.ctx.files.folder / "events.jsonl").unlink()
    key = cloud.ctx.files.key.read_text()

    name = "aws" if region == "eu-west-1" else cloud.ctx.cloud.name
    monkeypatch.setattr("cluster.lifecycle.down.describe_inventory", lambda *_: Inventory())
    cloud.seen_as(name=name, region=region).down()

    assert cloud.ctx.files.key.read_text() == key
