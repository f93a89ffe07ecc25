"""What machines need beyond their type: close neighbors, ENA Express, and time for a cold disk."""

from __future__ import annotations

from tests.harness.simulated_cloud import SimulatedCloud


def test_a_cluster_of_one_that_grows_has_its_network_from_the_start(
    simulated_cloud: SimulatedCloud,
) -> None:
    simulated_cloud.up(nodes=1)

    cluster = simulated_cloud.up(nodes=3)

    requests = simulated_cloud.recorder.of("RunInstances")
    assert [r["Placement"]["GroupName"] for r in requests] == ["spr-cluster-bert"] * len(requests)
    assert [node.instance.ena_express for node in cluster.nodes] == [True] * 3


def test_machines_with_ena_express_have_its_mtu_and_verify_expects_it(
    simulated_cloud: SimulatedCloud,
) -> None:
    cluster = simulated_cloud.up(nodes=2)

    assert [simulated_cloud.machine(n.instance.id)["mtu"] for n in cluster.nodes] == [8900] * 2
    assert "mtu" not in simulated_cloud.progress.notes[-1]
    simulated_cloud.change_machine(cluster.nodes[1].instance.id, mtu=9001)
    simulated_cloud.up()
    assert "node1: mtu: ens5: 9001" in simulated_cloud.progress.notes[-1]
