"""A cluster's life on real machines: interrupted, grown, broken, repaired, forgotten, given back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.conftest import Baked, CommandLine, LiveCluster, kill_when, podman

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

_TTL_BAR_S = 120


def resources(cli: CommandLine, name: str) -> dict[str, Any]:
    """What EC2 shows of a cluster."""
    found: dict[str, Any] = cli.json("status", "--name", name, "--cloud", "local")["resources"]
    return found


def hear_all(cluster: LiveCluster) -> list[str]:
    """The host names of all nodes, asked from the head by name without a password."""
    return cluster.cli.ssh("node0", "for n in $(cat ~/hosts); do ssh $n hostname; done").split()


@pytest.fixture(scope="module", autouse=True)
def forgotten(cli: CommandLine, baked: Baked) -> Iterator[Future[float]]:
    """How many seconds a cluster lives that is forgotten while the other tests run."""
    brief = ("--name", "brief", "--nodes", "1", "--ttl", "1m")
    kill_when(cli.start("up", *brief, "--cloud", "local"), "bought:")
    bought = time.monotonic()
    (instance,) = resources(cli, "brief")["instances"]
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(live, instance, bought)


def live(instance: str, bought: float) -> float:
    while instance in podman("ps", "--format={{.Names}}"):
        lived = time.monotonic() - bought
        assert lived < _TTL_BAR_S
        time.sleep(1)
    return time.monotonic() - bought


def test_an_interrupted_up_is_continued_not_repeated(cluster: LiveCluster) -> None:
    assert cluster.continued == cluster.interrupted
    found = resources(cluster.cli, "spr")
    assert {kind: len(ids) for kind, ids in found.items()} == {
        "instances": 3,
        "spot_requests": 3,
        "volumes": 3,
        "interfaces": 3,
        "security_groups": 1,
        "placement_groups": 1,
        "key_pairs": 1,
    }


def test_an_interrupted_bake_is_continued_and_leaves_its_image_alone(
    cli: CommandLine, baked: Baked
) -> None:
    assert baked.machines == baked.interrupted
    assert resources(cli, baked.cluster).keys() == {"images", "snapshots"}
    (listed,) = cli.json("images", "--cloud", "local")["images"]
    assert (listed["image"], listed["state"], listed["kept"]) == (baked.ami, "ready", True)


def test_a_cluster_grows_and_shrinks(cluster: LiveCluster) -> None:
    grown = cluster.cli.json("up", "--nodes", "4")
    assert grown["nodes"][:3] == cluster.up_result["nodes"]
    assert len(set(hear_all(cluster))) == 4

    shrunk = cluster.cli.json("up", "--nodes", "3")
    assert shrunk["nodes"] == cluster.up_result["nodes"]
    assert len(hear_all(cluster)) == 3


def test_extend_changes_the_nodes_and_the_tags(cluster: LiveCluster) -> None:
    before = cluster.cli.json("status")["left_s"]

    result = cluster.cli.json("extend", "90m")

    assert cluster.cli.json("status")["left_s"] == pytest.approx(before + 5400, abs=120)
    for name in cluster.names:
        shown = cluster.cli.ssh(name, "sudo sh /run/spr-cluster/expiry show").split()
        expires, latest, grace_s = map(int, shown)
        assert time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(expires)) == result["expires"]
        assert latest == expires + grace_s


def test_a_changed_host_key_is_refused_and_explained(cluster: LiveCluster) -> None:
    known = cluster.cli.home / "spr" / "known_hosts"
    text = known.read_text()
    # The last characters of a key are those of the key itself.
    lines = [line[:-8] + "AAAAAAAA" for line in text.splitlines()]
    known.write_text("\n".join(lines) + "\n")
    try:
        refused = cluster.cli.run("extend", "1h", check=1)
    finally:
        known.write_text(text)

    assert "host key" in refused.stderr
    assert str(known) in refused.stderr


def test_up_on_a_finished_cluster_changes_nothing(cluster: LiveCluster) -> None:
    before = resources(cluster.cli, "spr")

    again = cluster.cli.json("up")

    assert again["changed"] is False
    assert again["nodes"] == cluster.up_result["nodes"]
    assert resources(cluster.cli, "spr") == before


def test_a_forgotten_cluster_ends_itself_and_gc_removes_the_rest(
    cli: CommandLine, forgotten: Future[float]
) -> None:
    assert forgotten.result() < _TTL_BAR_S

    left = resources(cli, "brief")
    assert "instances" not in left
    assert "volumes" not in left
    assert "security_groups" in left
    clusters = cli.json("list", "--cloud", "local")["clusters"]
    assert [c["state"] for c in clusters if c["cluster"] == "brief"] == ["expired"]
    assert cli.json("gc", "--cloud", "local")["removed"] == ["brief"]
    assert resources(cli, "brief") == {}


@pytest.mark.full
def test_an_idle_cluster_ends_itself(cli: CommandLine) -> None:
    cli.json("up", "--name", "idle", "--nodes", "2", "--cloud", "local", "--idle-timeout", "5m")
    deadline = time.monotonic() + 8 * 60
    while "instances" in resources(cli, "idle"):
        assert time.monotonic() < deadline
        time.sleep(5)
    cli.run("down", "--name", "idle")
