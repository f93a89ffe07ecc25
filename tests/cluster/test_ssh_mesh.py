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
from provision.facts import parse_facts
from provision.host import Host
from tests.fakes import FakeHost, facts_answer
from tests.golden import check_golden

GOLDEN = Path(__file__).with_name("golden")


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


NODES = tuple(make_node(rank) for rank in range(3))
CLUSTER = Cluster("bert", NODES, len(NODES))


def test_ssh_config_of_this_machine() -> None:
    place = ("/home/me/.spr/id", "/home/me/.spr/known_hosts", "us-east-1")
    text = mesh.render_client_ssh_config(CLUSTER, *place)
    check_golden(GOLDEN / "client_ssh_config", text)


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


def test_all_nodes_get_the_same_files_and_fresh_keys() -> None:
    facts = {
        node.name: replace(
            parse_facts(facts_answer(hostname=f"ip-172-31-0-{10 + node.rank}")),
            host_key=f"ssh-ed25519 KEY{node.rank}",
        )
        for node in NODES
    }
    hosts = {node.name: FakeHost(node.name, [("tar -C", "")]) for node in NODES}

    def open_host(node: Node) -> Host:
        return hosts[node.name]

    mesh.connect_nodes(CLUSTER, facts, open_host)

    bundles = {content for host in hosts.values() for content in host.files.values()}
    assert len(bundles) == 1
    with tarfile.open(fileobj=io.BytesIO(bundles.pop())) as archive:
        slurm = (
            *("configure.sh", "cores.json", "epilog.sh", "health.sh", "limits.py", "munge.conf"),
            *("munge.key", "slurm.conf", "slurmctld.conf", "slurmd.conf", "task_prolog.sh"),
        )
        assert {*archive.getnames()} == {
            *(".spr-cluster-hosts", ".ssh/config", ".ssh/known_hosts", "hosts"),
            *(".ssh/spr-cluster", ".ssh/spr-cluster.pub"),
            *(f".spr-cluster-slurm/{name}" for name in slurm),
        }
        assert {member.mode for member in archive} == {0o600}
        for name, golden in (
            (".ssh/config", "ssh_config"),
            (".ssh/known_hosts", "known_hosts"),
            (".spr-cluster-hosts", "etc_hosts"),
            ("hosts", "hosts"),
        ):
            file = archive.extractfile(name)
            assert file
            check_golden(GOLDEN / golden, file.read().decode())
