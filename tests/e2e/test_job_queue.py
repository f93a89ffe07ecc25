"""Jobs in the queue of a real Slurm on three nodes: they outlive the command that submitted them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import DEMO_JOB, LiveCluster, Trained
from tests.harness.processes import JobProcesses

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def submit(cluster: LiveCluster, *argv: str) -> str:
    """Submit a job without following it; returns its ID."""
    at = argv.index("--") if "--" in argv else len(argv)
    kept = tempfile.mkdtemp(dir=cluster.cli.home.parent)
    done = cluster.cli.run(*argv[:at], "--detach", "--json", "--results", kept, *argv[at:])
    return str(json.loads(done.stdout)["job"])


def states(cluster: LiveCluster, *jobs: str) -> list[str]:
    listed = {each["job"]: each["state"] for each in cluster.cli.json("jobs")["jobs"]}
    return [listed[job] for job in jobs]


def test_a_job_outlives_its_killed_command_and_is_followed_from_another_laptop(
    trained: Trained,
) -> None:
    shown = [line for line in trained.log.splitlines() if "samples/s" not in line]
    assert shown
    assert [line for line in trained.done.stderr.splitlines() if line in shown] == shown
    record = json.loads((trained.folder / "job/job.json").read_text())
    assert (record["job"], record["state"]) == (trained.job, "succeeded")
    assert record["exit_code"] == 0
    assert len(record["nodes"]) == len(record["placement"]["shares"]) == 3
    assert "F1 " in trained.done.stdout


def test_ctrl_c_leaves_the_job_and_cancel_saves_a_checkpoint(
    cluster: LiveCluster, tmp_path: Path
) -> None:
    endless = ("train", "digits", "--epochs", "10000", "--checkpoint-every", "1000")
    running = cluster.cli.start(*endless, "--results", str(tmp_path))
    assert running.stdout is not None
    next(line for line in running.stdout if "step " in line)
    running.send_signal(signal.SIGINT)
    rest, _ = running.communicate(timeout=30)
    assert running.returncode == 130, rest
    found = re.search(r"to end it: +spr-cluster cancel (\S+)", rest)
    assert found, rest
    assert states(cluster, found[1]) == ["running"]
    assert json.loads((tmp_path / "job/job.json").read_text())["exit_code"] is None

    processes = JobProcesses.find(cluster.cli.ssh, cluster.names)
    cancelled = cluster.cli.json("cancel")

    assert (cancelled["job"], cancelled["state"]) == (found[1], "cancelled")
    assert (cancelled["exit_code"], cancelled["unreachable"]) == (143, [])
    assert cancelled["checkpoint"]
    processes.require_gone()
    assert states(cluster, found[1]) == ["cancelled"]


def test_jobs_run_side_by_side_and_in_order(cluster: LiveCluster, tmp_path: Path) -> None:
    wait = "until [ -e /tmp/go ]; do sleep 0.2; done"
    first = submit(cluster, "run", "--nodes", "1", "--", "sh", "-c", wait)
    second = submit(
        cluster, "run", "--nodes", "1", "--", "sh", "-c", f"echo from $(hostname); {wait}"
    )
    third = submit(cluster, "run", "--", "hostname")
    assert states(cluster, first, second, third) == ["running", "running", "queued"]
    for name in cluster.names:
        cluster.cli.ssh(name, "touch /tmp/go")

    for job in (first, second, third):
        cluster.cli.run("wait", job, "--timeout", "300")

    jobs: dict[str, Any] = {each["job"]: each for each in cluster.cli.json("jobs")["jobs"]}
    assert {*jobs[first]["nodes"], *jobs[second]["nodes"]} < set(cluster.names)
    assert jobs[first]["nodes"] != jobs[second]["nodes"]
    ended = max(jobs[first]["ended"], jobs[second]["ended"])
    assert jobs[third]["began"] >= ended[:19]
    # It ran on another node than the head, which has its log and results all the same.
    host = cluster.cli.ssh(jobs[second]["nodes"][0], "hostname").strip()
    assert f"from {host}" in cluster.cli.run("logs", second).stdout
    cluster.cli.run("fetch", second, "--results", str(tmp_path))
    assert f"from {host}" in (tmp_path / "job/log").read_text()


def test_a_user_of_slurm_needs_nothing_of_this_tool(cluster: LiveCluster) -> None:
    done = cluster.cli.ssh("node0", "srun --nodes=3 hostname | sort")
    assert done.split() == sorted(cluster.hostnames)
    cluster.wait_until_idle()


def place_script(cluster: LiveCluster, trained: Trained, name: str, folder: Path) -> None:
    """Render the job that ``trained`` is as a Slurm script, and put its folder on every node.

    A center's nodes share one folder. Here, each has its own; the venv is the one that they have.
    """
    cores = trained.results["ranks"][0]["threads"]
    shape = ("--nodes", "3", "--shape", f"cores={cores}", "--job-name", name)
    cluster.cli.run(*DEMO_JOB, "--to", "slurm-script", *shape, "--output", str(folder))
    config = cluster.cli.home / "spr" / "ssh_config"
    for node in cluster.names:
        argv = ["scp", "-qrF", str(config), str(folder), f"{node}:{name}"]
        subprocess.run(argv, check=True, timeout=60)
        cluster.cli.ssh(node, f"ln -s /opt/spr-cluster/venv {name}/venv")
    # As install.sh does at its end.
    cluster.cli.ssh("node0", f"cd {name} && cat install.sh requirements.txt > installed")


def require_same_training(cluster: LiveCluster, trained: Trained, name: str) -> Any:
    results = json.loads(cluster.cli.ssh("node0", f"cat {name}/output/results.json"))
    assert results["loss_curve"] == trained.results["loss_curve"]
    assert [rank["hostname"] for rank in results["ranks"]] == cluster.hostnames
    for rank in results["ranks"]:
        assert rank["found"]["cpus"] == rank["planned"]["cpus"]
        assert rank["threads"] == rank["cpus"] == trained.results["ranks"][0]["threads"]
    return results


@pytest.mark.full
def test_the_script_goes_on_after_its_time_limit(
    cluster: LiveCluster, trained: Trained, tmp_path: Path
) -> None:
    place_script(cluster, trained, "limited", tmp_path / "job")
    # The signal that Slurm sends before the limit; its shortest limit would take a minute.
    steps = "id=$(sbatch --parsable job.sbatch); until grep -qs samples_per_second log; do sleep 0.1; done"
    signal_it = "scancel --signal=USR1 --batch $id"
    gone = "until [ -e output/results.json ]; do sleep 0.5; done; scontrol show job $id"
    script = f"cd limited && timeout 300 bash -c '{steps}; {signal_it}; {gone}'"
    ended = cluster.cli.ssh("node0", script)

    assert "Restarts=1" in ended
    (step,) = require_same_training(cluster, trained, "limited")["resumed_after"]
    assert 0 < step < trained.results["loss_curve"][-1][0]
    cluster.wait_until_idle()
