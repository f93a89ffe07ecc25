"""The main job as a user does it: up, train, down, with real SSH, real mpirun and real DDP."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from provision.install import MPIRUN_ENV
from tests.e2e.conftest import Baked, CommandLine, LiveCluster, Trained

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
_TIMER = "spr-cluster-expiry.timer"


def test_up_makes_nodes_that_reach_each_other_by_name_without_a_prompt(
    cluster: LiveCluster,
) -> None:
    nodes = cluster.up_result["nodes"]
    assert cluster.names == ["node0", "node1", "node2"]
    assert (cluster.up_result["cloud"], cluster.up_result["stack"]) == ("local", "upstream")
    assert {node["state"] for node in nodes} == {"running"}
    addresses = [node["private_ip"] for node in nodes]
    assert addresses == [node["public_ip"] for node in nodes]
    assert len(set(addresses)) == 3
    ask_all = "for n in $(cat ~/hosts); do ssh $n hostname; done"
    resolve = "getent ahostsv4 node0 node2 | awk '{print $1}' | uniq"

    for name in cluster.names:
        found = cluster.cli.ssh(name, f"{ask_all}; {resolve}; systemctl is-active {_TIMER}")
        assert found.split() == [*cluster.hostnames, addresses[0], addresses[2], "active"]


def files_below(folder: Path) -> Iterator[Path]:
    """All files in a folder, except those of Python's packages, which are most."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "site-packages"]
        yield from (Path(parent, name) for name in names)


def holds_secret(content: bytes) -> bool:
    """Whether a file has a private key, an access key of AWS, or a token of the hub."""
    # What each of the expressions contains: this is found much faster.
    parts = (b"PRIVATE KEY", b"AKIA", b"ASIA", b"aws_secret_access_key", b"hf_")
    secrets = (
        rb"-----BEGIN [A-Z ]*PRIVATE KEY",
        rb"\b(AKIA|ASIA)[0-9A-Z]{16}\b",
        rb"aws_secret_access_key *=",
        rb"\bhf_[A-Za-z0-9]{30,}",
    )
    return any(part in content for part in parts) and bool(re.search(b"|".join(secrets), content))


def test_the_image_holds_no_private_key_and_no_identity(cli: CommandLine, baked: Baked) -> None:
    assert cli.cloud
    disk = cli.cloud / "images" / baked.ami
    # Files that hold such things whatever they look like.
    names = {"credentials", ".netrc", ".bash_history", "authorized_keys", ".git-credentials"}

    found = [
        path
        for folder in ("etc", "home", "root", "tmp", "var", "opt/spr-cluster")
        for path in files_below(disk / folder)
        if path.is_file()
        and not path.is_symlink()
        and ((path.name in names and path.stat().st_size) or holds_secret(path.read_bytes()))
    ]

    assert (disk / "opt/spr-cluster/venv/bin/mpirun").exists()
    assert found == []
    assert list((disk / "etc/ssh").glob("ssh_host_*")) == []
    assert list((disk / "etc/munge").iterdir()) == []
    assert (disk / "etc/machine-id").read_text() == ""


def test_the_cluster_key_stays_on_this_machine(cluster: LiveCluster) -> None:
    key = (cluster.cli.home / "spr" / "id_ed25519").read_text().splitlines()[2]
    # sudo writes its command to the journal; so written, the pattern does not find itself there.
    pattern = f"[{key[0]}]{key[1:]}"

    for name in cluster.names:
        search = f"sudo grep -rqs '{pattern}' /etc /home /root /var || echo clean"
        assert cluster.cli.ssh(name, search) == "clean\n"


def test_ssh_hands_on_the_commands_exit_code(cluster: LiveCluster) -> None:
    done = cluster.cli.run("ssh", "node1", "--", "hostname; exit 7", check=7)
    assert done.stdout.startswith("ip-")


def test_slurm_runs_jobs_in_order_and_survives_the_death_of_its_daemons(
    cluster: LiveCluster,
) -> None:
    exports = "; ".join(f"export {name}={value}" for name, value in MPIRUN_ENV.items())
    rank = "hostname; touch began; while [ -e began ]; do sleep 0.2; done"
    mpirun = f"mpirun -bootstrap slurm -ppn 1 -n 3 sh -c '{rank}'"
    script = f"#!/bin/sh\nsetsid sleep 600 </dev/null >/dev/null 2>&1 &\n{exports}\n{mpirun}\n"
    submit = f"cd /tmp && sbatch --parsable -N3 -o %j.log <<'END'\n{script}END\n"
    pause = "until [ -e began ]; do sleep 0.2; done; sleep 6"
    kill = "sudo pkill -9 slurmctld; sudo pkill -9 slurmd; sudo pkill -9 munged"
    for_all = "for n in $(cat ~/hosts); do ssh $n"
    wait = f"{for_all} 'until rm /tmp/began 2>/dev/null; do sleep 0.2; done' & done; wait"

    first, second = cluster.cli.ssh("node0", f"{submit}{submit}cd /tmp; {pause}; {kill}").split()
    for _ in range(2):
        cluster.cli.ssh("node0", wait)
    gone = 'until [ -z "$(squeue -h)" ]; do sleep 0.5; done'
    logs = f"{gone}; cat /tmp/{first}.log; {for_all} pgrep -u ubuntu sleep; done; sinfo -h -o %T"
    ended = cluster.cli.ssh("node0", logs).split()
    restarts = cluster.cli.ssh("node0", f"scontrol show job {first}; scontrol show job {second}")

    # Nothing is left, not even of what left the job's process tree.
    assert sorted(ended) == sorted([*cluster.hostnames, "idle"])
    assert restarts.count("JobState=COMPLETED") == 2
    assert restarts.count("Restarts=0") == 2


def test_training_runs_on_all_nodes_and_learns(trained: Trained) -> None:
    result = trained.results

    assert "world size 3 on 3 hosts" in trained.done.stdout
    assert result["f1"] >= 80
    assert result["world_size"] == 3
    assert {rank["hostname"] for rank in result["ranks"]} == set(trained.hostnames)
    assert result["backend"] == "gloo"
    assert result["loss_curve"][-1][1] < result["loss_curve"][0][1] / 5
    assert (trained.folder / "model" / "config.json").is_file()
    # Nodes whose CPUs differ have an argument set of their own, others share one.
    launch = r"mpirun -bootstrap slurm -ppn 1 -wdir \S+ (-n 3 )?-genv "
    assert re.search(launch, (trained.folder / "job/job.json").read_text())
    assert "mpirun" not in trained.done.stderr


def test_down_leaves_nothing_and_can_be_said_twice(cluster: LiveCluster) -> None:
    """The last test of this module: it takes the cluster away."""
    first = cluster.cli.run("down", "--yes")
    assert "Nothing left of cluster spr" in first.stdout
    again = cluster.cli.run("down", "--name", "spr", "--cloud", "local")
    assert "Nothing of cluster spr exists" in again.stdout
    # What was done, and why, outlives the cluster.
    assert [path.name for path in (cluster.cli.home / "spr").iterdir()] == ["events.jsonl"]
    spr = ("--name", "spr", "--cloud", "local")
    assert cluster.cli.json("status", *spr)["resources"] == {}
