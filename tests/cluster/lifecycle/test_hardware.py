"""What machines need beyond their type: close neighbors, ENA Express, and time for a cold disk."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from cluster.verify.results import Verdict, expect
from cluster.verify.verify import verify_cluster
from infra.errors import UsageError
from infra.instance_types import INSTANCE_TYPES
from provision.stacks.load import load_stack
from tests.harness.simulated_cloud import SimulatedCloud


def test_machines_with_ena_express_have_its_mtu_and_verify_expects_it(
    cloud: SimulatedCloud,
) -> None:
    cloud.prepared(nodes=1)
    cluster = cloud.up(nodes=2)

    groups = {request["Placement"]["GroupName"] for request in cloud.purchases()}
    assert groups == {"spr-cluster-bert"}, "from the start"
    assert [node.instance.ena_express for node in cluster.nodes] == [True] * 2
    assert [cloud.machine(n.instance.id)["mtu"] for n in cluster.nodes] == [8900] * 2
    assert "mtu" not in cloud.progress.notes[-1]
    cloud.change_machine(cluster.nodes[1].instance.id, mtu=9001)
    cloud.up()
    assert "node1: mtu: ens5: 9001" in cloud.progress.notes[-1]


def verdicts(cloud: SimulatedCloud) -> list[tuple[str, str]]:
    """What `verify` finds wrong, as check and finding."""
    cluster, stack = cloud.cluster(), load_stack("upstream")
    recorded = {"volume_gib": 100, "grace": timedelta(minutes=30)}
    expected = expect(cloud.ctx.cloud, cluster, recorded, stack, INSTANCE_TYPES["r7iz.metal-16xl"])
    report = verify_cluster(cluster, expected, cloud.ctx.host_opener(), cloud.progress)
    return [(r.check, r.found) for r in report.results if r.verdict in (Verdict.FAIL, Verdict.WARN)]


def test_a_disk_that_is_slow_when_first_read_delays_verify_and_does_not_fail_it(
    cloud: SimulatedCloud,
) -> None:
    cloud.faults("[disk]\nfirst_read_mib_s = 0.5\n")
    cloud.up(nodes=2)

    began = cloud.clock.now
    assert verdicts(cloud) == []

    assert cloud.clock.now - began > 120
    assert "node1: a new disk, read for the first time, is slow" in cloud.progress.notes


def test_the_speed_of_disks_is_recorded_and_kept(cloud: SimulatedCloud) -> None:
    for kind, mib_s in (("r7iz.metal-16xl", 750), ("r7iz.4xlarge", None)):
        assert cloud.plan_input(instance_types=(kind,)).spec.volume_throughput == mib_s
    cloud.up(nodes=1, volume_iops=4000, volume_throughput=250)
    cloud.up(nodes=2)

    disks = [r["BlockDeviceMappings"][0]["Ebs"] for r in cloud.purchases()]
    assert {(disk["Iops"], disk["Throughput"]) for disk in disks} == {(4000, 250)}
    others: list[dict[str, Any]] = [{"volume_iops": 5000}, {"volume_throughput": 300}]
    for other in others:
        with pytest.raises(UsageError, match="was created with"):
            cloud.plan_input(**other)


def test_a_worker_that_ec2_takes_back_is_replaced_while_it_still_runs(
    cloud: SimulatedCloud,
) -> None:
    worker = cloud.up(nodes=2, market="spot").workers[0].instance.id
    assert cloud.plan().terminations == ()
    cloud.faults(f'[spot]\ninterrupt = ["{worker}"]\n')

    (removal,) = cloud.plan().terminations
    assert removal.ids == (worker,)
    assert "EC2 is reclaiming it" in removal.detail


def test_images_and_ends_that_take_an_hour_are_waited_for(cloud: SimulatedCloud) -> None:
    cloud.faults("image_s = 3600\nterminate_s = 3600\n")
    cloud.clock.pace = 60

    lost = cloud.up(nodes=2).workers[0].instance.id
    assert cloud.clock.now - cloud.began > 3600
    cloud.ec2.stop_instances(InstanceIds=[lost])
    began = cloud.clock.now
    cloud.up()
    assert cloud.cluster().is_whole
    assert cloud.clock.now - began < 1200, "`up` waits for a machine that is of no use"

    cloud.down()
    assert cloud.left() == []
    noted = [note for note in cloud.progress.notes if note.startswith("shutting down")]
    assert any("min of at most 100" in note for note in noted)
