"""A rank or a node is lost in the midst of a job on real nodes: the job fails or goes on, and then it is the
job that never was interrupted."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.conftest import DEMO_JOB, LiveCluster, Trained, podman
from tests.harness.processes import RANK, JobProcesses

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def read_until(job: subprocess.Popen[str], text: str) -> list[str]:
    """A job's lines up to the one that has this text."""
    assert job.stdout is not None
    result = []
    for line in job.stdout:
        result.append(line)
        if text in line:
            return result
    raise AssertionError("".join(result))


def losses(results: Path) -> list[list[tuple[int, float]]]:
    """Of every rank, step by step."""
    files = [results / "job" / "metrics" / f"rank-{rank}.jsonl" for rank in range(3)]
    lines = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    assert all(lines)
    return [[(each["step"], each["loss"]) for each in rank] for rank in lines]


def wait_for_step(job: subprocess.Popen[str], wanted: int) -> None:
    assert job.stdout is not None
    result = []
    for line in job.stdout:
        result.append(line)
        step = re.search(r"step (\d+)/", line)
        if step and int(step[1]) >= wanted:
            return
    raise AssertionError("".join(result))


@pytest.mark.full
def test_a_killed_and_resumed_job_learns_the_same_to_the_bit(
    cluster: LiveCluster, trained: Trained, tmp_path: Path
) -> None:
    whole, killed = trained.folder, tmp_path / "killed"
    job = cluster.cli.start(*DEMO_JOB, "--retries", "0", "--results", str(killed))
    wait_for_step(job, 30)
    processes = JobProcesses.find(cluster.cli.ssh, cluster.names)

    cluster.cli.ssh("node1", f"pkill -KILL -f '{RANK}'")
    rest, _ = job.communicate(timeout=120)
    assert job.returncode == 1, rest
    # Whoever is first: the other ranks or mpirun.
    lost, dead = "rank 1 on node1: its process ended", "rank 1 on node1: killed by signal 9"
    assert lost in rest or dead in rest, rest
    processes.require_gone()

    done = cluster.cli.run("train", "squad", "--resume", "--results", str(killed))

    after = re.search(r"resuming after step (\d+) of", done.stderr)
    assert after, done.stderr
    assert int(after[1]) >= 28
    assert losses(killed) == losses(whole)
    results = [json.loads((each / "results.json").read_text()) for each in (whole, killed)]
    assert results[0]["loss_curve"] == results[1]["loss_curve"]
    assert [each["resumed_after"] for each in results] == [[], [int(after[1])]]
    logs = [(killed / "job" / "logs" / f"rank-{rank}.log").read_text() for rank in range(3)]
    # Only rank 0 tells the user.
    assert ['"event": "resumed"' in log for log in logs] == [True, False, False]
    assert (killed / "job" / "log.earlier").read_text()
    assert not (killed / "job" / "checkpoints").exists()
    refused = cluster.cli.run("train", "squad", "--resume", after_job(done.stderr), check=2)
    assert "has nothing to resume: it is finished" in refused.stderr


def after_job(text: str) -> str:
    """The job's id."""
    found = re.search(r"job (squad-[\w-]+) resumes", text)
    assert found
    return found[1]


def model(results: Path) -> bytes:
    return (results / "model" / "model.safetensors").read_bytes()


# Makes the next copy of a checkpoint to node1 hang, and waits until it does.
_HANG_AMID_A_COPY = """printf '#!/bin/sh\\nexec sleep 999\\n' | sudo tee /usr/local/bin/tar >/dev/null
sudo chmod 755 /usr/local/bin/tar
for i in $(seq 100); do pgrep -fx 'sleep 999' && exit; sleep 0.1; done
sudo rm /usr/local/bin/tar; exit 1"""


def cut_off(cluster: LiveCluster) -> None:
    """Cut node1 off while it takes a checkpoint: nothing closes that connection."""
    cluster.cli.ssh("node1", _HANG_AMID_A_COPY)
    for chain in ("INPUT", "OUTPUT"):
        cluster.in_network("node1", "iptables", "-I", chain, "-j", "DROP")


def freeze(cluster: LiveCluster) -> None:
    cluster.cli.ssh("node1", f"pkill -STOP -f '{RANK}'")


def kill_node(cluster: LiveCluster, name: str = "node1") -> None:
    podman("kill", cluster.container(name))


def replace_nodes(cluster: LiveCluster, *victims: str) -> None:
    """Put other machines in the place of some that are lost."""
    nodes = {node["name"]: node["instance"] for node in cluster.up_result["nodes"]}
    kept = [instance for name, instance in nodes.items() if name not in victims]
    cluster.up_result.update(cluster.cli.json("repair"))
    found = [node["instance"] for node in cluster.up_result["nodes"]]
    assert (len(found), {*found} & {*nodes.values()}) == (3, {*kept})
    # If the head is lost, a worker becomes the head.
    assert found[0] == kept[0]
    ask_all = "for n in $(cat ~/hosts); do ssh $n hostname; done"
    assert cluster.cli.ssh("node0", ask_all).split() == cluster.hostnames


@contextmanager
def impatient(cluster: LiveCluster) -> Iterator[None]:
    """Ranks of jobs that are submitted meanwhile give up a silent one after 15 seconds instead of 45."""
    packages = cluster.cli.programs.parent.glob("lib/python*/site-packages")
    (path,) = (each / "jobs/worker/runtime/heartbeat.py" for each in packages)
    text = path.read_text()
    shorter = text.replace("\nWARN_SECONDS = 20.0\n", "\nWARN_SECONDS = 6.0\n")
    shorter = shorter.replace("\nLIMIT_SECONDS = 45.0\n", "\nLIMIT_SECONDS = 15.0\n")
    assert "\nWARN_SECONDS = 6.0\nLIMIT_SECONDS = 15.0\n" in shorter
    path.unlink()  # it may be a link to what uv has stored
    path.write_text(shorter)
    try:
        yield
    finally:
        path.write_text(text)


needs_iptables = pytest.mark.skipif(not shutil.which("iptables"), reason="needs iptables")


@pytest.mark.parametrize(
    "lose",
    [
        pytest.param(cut_off, marks=needs_iptables),
        pytest.param(freeze, marks=pytest.mark.full),
        pytest.param(kill_node, marks=pytest.mark.full),
    ],
)
def test_a_job_that_loses_a_worker_goes_on_by_itself(
    cluster: LiveCluster, trained: Trained, tmp_path: Path, lose: Callable[[LiveCluster], None]
) -> None:
    with impatient(cluster):
        job = cluster.cli.start(*DEMO_JOB, "--results", str(tmp_path))
        wait_for_step(job, 30)

    begin = time.monotonic()
    lose(cluster)
    shown = read_until(job, "attempt 1 ended: ")
    assert time.monotonic() - begin < 60, shown
    assert re.search(r"rank 1\b", shown[-1])
    assert "node1" in shown[-1]
    if lose is not freeze:
        read_until(job, "a node that it requires is down")
    if lose is cut_off:
        # As if AWS had ended it: `repair` waits long for a young machine that only does not answer.
        kill_node(cluster)
    if lose is not freeze:
        refused = cluster.cli.run("train", "squad", "--demo", check=1)
        assert "cluster spr is degraded: 2 of 3 nodes" in refused.stderr
        replace_nodes(cluster, "node1")
    rest, _ = job.communicate(timeout=300)

    assert job.returncode == 0, rest
    assert re.search(r"resuming after step (\d+) of", rest), rest
    assert model(tmp_path) == model(trained.folder)
    assert loss_curve(tmp_path) == loss_curve(trained.folder)


def loss_curve(results: Path) -> list[tuple[int, float]]:
    curve: list[tuple[int, float]] = json.loads((results / "results.json").read_text())[
        "loss_curve"
    ]
    return curve


@pytest.fixture
def faults(cluster: LiveCluster) -> Iterator[Path]:
    """The file with the embedded cloud's faults, which the server follows."""
    path = Path(cluster.cli.json("local", "status")["folder"]) / "faults.toml"
    yield path
    path.unlink(missing_ok=True)


def test_a_job_leaves_a_node_before_ec2_takes_it_and_a_worker_can_become_the_head(
    cluster: LiveCluster, faults: Path, tmp_path: Path
) -> None:
    # No machine finishes it before the notice, and the test does not wait for its end.
    endless = (*DEMO_JOB, "--epochs", "2000", "--elastic", "2", "--results", str(tmp_path))
    job = cluster.cli.start(*endless)
    wait_for_step(job, 30)
    instance = cluster.up_result["nodes"][1]["instance"]

    # So long that the node is there until this test ends it, even on a busy machine.
    faults.write_text(f'[spot]\ninterrupt = ["{instance}"]\nnotice_s = 900\n')
    shown = "".join(read_until(job, "attempt 1 ended: "))
    assert "attempt 1 ended: rank 1 on node1: its node, node1, goes: EC2 takes it back" in shown
    restart = "".join(read_until(job, "resuming after step "))
    # On a busy machine, the rank's line comes after the supervisor's.
    saved = re.search(r"stopped after step (\d+) of", shown + restart)
    assert saved, shown + restart
    assert "attempt 2, on node0, node2" in restart
    # A checkpoint is saved before the ranks stop, so no step is lost.
    assert f"resuming after step {saved[1]} of" in restart
    wait_for_step(job, int(saved[1]) + 1)
    ended = cluster.cli.json("cancel")
    rest, _ = job.communicate(timeout=120)

    assert ended["state"] == "cancelled", rest
    for name in ("node0", "node1"):
        kill_node(cluster, name)
    replace_nodes(cluster, "node0", "node1")


def in_mounts(cluster: LiveCluster, node: str, *command: str) -> None:
    """Run a command of a node that its own root may not run."""
    pid = podman("inspect", "--format={{.State.Pid}}", cluster.container(node)).strip()
    argv = ["nsenter", f"--target={pid}", "--mount", "--pid", *command]
    subprocess.run(argv, capture_output=True, check=True, timeout=60)


@pytest.fixture
def small_disk(cluster: LiveCluster) -> Iterator[str]:
    """The folder of node1's jobs, with room for little more."""
    folder = "/home/ubuntu/spr-jobs"
    uid = cluster.cli.ssh("node1", f"mkdir -p {folder}; id -u").strip()
    options = f"size=300m,uid={uid},gid={uid}"
    in_mounts(cluster, "node1", "mount", "-t", "tmpfs", "-o", options, "tmpfs", folder)
    yield folder
    in_mounts(cluster, "node1", "umount", "--lazy", folder)


@pytest.mark.full
def test_a_job_leaves_a_node_whose_disk_is_full_until_there_is_room(
    cluster: LiveCluster, trained: Trained, tmp_path: Path, small_disk: str
) -> None:
    fill = f"head -c 400M /dev/zero > {small_disk}/filler 2>/dev/null || true"
    job = cluster.cli.start(*DEMO_JOB, "--results", str(tmp_path / "cut"))
    wait_for_step(job, 30)

    begin = time.monotonic()
    cluster.cli.ssh("node1", fill)
    shown = "".join(read_until(job, "attempt 1 ended: "))
    assert time.monotonic() - begin < 60, shown
    cause = f"rank 1 on node1: its node, node1, has a full disk: {small_disk} has 0 MiB free"
    assert f"attempt 1 ended: {cause}" in shown
    read_until(job, "free space there, and it returns to the queue by itself")
    checked = cluster.cli.run("verify", "--no-bandwidth", check=1).stdout
    assert f"disk: {small_disk} has 0 MiB free" in checked
    cluster.cli.ssh("node1", f"rm {small_disk}/filler")
    rest, _ = job.communicate(timeout=120)

    assert job.returncode == 0, rest
    assert model(tmp_path / "cut") == model(trained.folder)
    assert loss_curve(tmp_path / "cut") == loss_curve(trained.folder)
