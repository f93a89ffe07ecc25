"""The files that the nodes get, as golden files."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest

from cluster import ssh_mesh as mesh
from cluster.nodes import Cluster, Node
from infra.ec2.instances import Instance
from provision.facts import HostFacts, parse_facts
from provision.host import Host
from tests.fakes import FakeHost, facts_answer
from tests.golden import check_golden

GOLDEN = Path(__file__).with_name("golden")
HOST_KEYS = {f"node{rank}": f"ssh-ed25519 KEY{rank}" for rank in range(3)}


def make_node(rank: int) -> Node:
    instance = Instance(
        id=f"i-{rank}",
        state="running",
        role="worker" if rank else "head",
        private_ip=f"172.31.0.{10 + rank}",
        public_ip=f"198.51.100.{10 + rank}",
        launch_index=0,
        launch_time=datetime(2026, 7, 31, tzinfo=timezone.utc),
        instance_type="r7iz.metal-16xl",
        zone="us-east-1a",
        tags={},
    )
    return Node(rank, instance)


HOSTNAMES = {f"node{rank}": f"ip-172-31-0-{10 + rank}" for rank in range(3)}
NODES = tuple(make_node(rank) for rank in range(3))
CLUSTER = Cluster("bert", NODES, len(NODES))


_LOCAL = (CLUSTER, "/home/me/.spr/id", "/home/me/.spr/known_hosts", "us-east-1")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("ssh_config", mesh.render_ssh_config(NODES)),
        ("known_hosts", mesh.render_known_hosts(NODES, HOST_KEYS)),
        ("etc_hosts", mesh.render_hosts_block(NODES, HOSTNAMES)),
        ("hosts", mesh.render_hostfile(NODES)),
        ("client_ssh_config", mesh.render_client_ssh_config(*_LOCAL)),
    ],
)
def test_a_file_is_as_it_was(file: str, text: str) -> None:
    check_golden(GOLDEN / file, text)


def test_plain_openssh_reaches_the_others_through_the_head(tmp_path: Path) -> None:
    client = shutil.which("ssh")
    if client is None:
        pytest.skip("OpenSSH's client is not installed")
    nodes = tuple(replace(node, jump="eice") for node in NODES)
    file = tmp_path / "ssh_config"
    file.write_text(
        mesh.render_client_ssh_config(replace(CLUSTER, nodes=nodes), "id", "known", "eu-west-1")
    )

    head, worker = (
        subprocess.check_output([client, "-G", "-F", file, name], text=True).splitlines()
        for name in ("node0", "node1")
    )

    assert any(line.startswith("proxycommand aws ec2-instance-connect") for line in head)
    assert {"proxyjump node0", "hostname 172.31.0.11", "hostkeyalias i-1"} <= set(worker)
    assert not any(line.startswith("proxycommand") for line in worker)


def test_only_the_nodes_get_the_fresh_keys() -> None:
    facts: dict[str, HostFacts] = {node.name: parse_facts(facts_answer()) for node in NODES}
    hosts = {node.name: FakeHost(node.name, [("tar -C", "")]) for node in NODES}

    def open_host(node: Node) -> Host:
        return hosts[node.name]

    mesh.connect_nodes(CLUSTER, facts, open_host)

    bundles = {content for host in hosts.values() for content in host.files.values()}
    assert len(bundles) == 1
    with tarfile.open(fileobj=io.BytesIO(bundles.pop())) as archive:
        assert sorted(archive.getnames()) == [
            ".spr-cluster-hosts",
            ".spr-cluster-slurm/configure.sh",
            ".spr-cluster-slurm/cores.json",
            ".spr-cluster-slurm/epilog.sh",
            ".spr-cluster-slurm/health.sh",
            ".spr-cluster-slurm/limits.py",
            ".spr-cluster-slurm/munge.conf",
            ".spr-cluster-slurm/munge.key",
            ".spr-cluster-slurm/slurm.conf",
            ".spr-cluster-slurm/slurmctld.conf",
            ".spr-cluster-slurm/slurmd.conf",
            ".spr-cluster-slurm/task_prolog.sh",
            ".ssh/config",
            ".ssh/known_hosts",
            ".ssh/spr-cluster",
            ".ssh/spr-cluster.pub",
            "hosts",
        ]
        assert {member.mode for member in archive} == {0o600}
