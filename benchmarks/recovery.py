"""Losses in the midst of a training job, one after the other, on three nodes of the embedded cloud.

A job trains without a loss; then the same job loses a rank, is frozen, loses Slurm's daemons, a worker, a
spot worker after EC2's notice, the room on a worker's disk, and the head. Prints when each was noticed,
when the job took its next step, how many steps were lost, and whether the final loss is that of the
undisturbed job.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from infra.local.machines.podman import choose_runtime
from tests.harness.processes import RANK

LOSSES = ("rank", "freeze", "daemons", "worker", "elastic", "spot", "disk", "head")
_CLI = (sys.executable, "-m", "jobs")
_JOB = ("train", "squad", "--demo", "--epochs", "60", "--checkpoint-every", "15", "--retries", "1")
_LOSE_AT, _LIMIT_S = 40, 900
_JOBS = "/home/ubuntu/spr-jobs"
_MOUNT = ("mount", "-t", "tmpfs", "-o", "size=300m,uid=1000,gid=1000", "tmpfs", _JOBS)
_STEP = re.compile(r"step (\d+)/")
_NOTICED = re.compile(r"attempt 1 ended|connection broke|ended with its head node|waiting in the")


def run_podman(*words: str) -> str:
    argv = ["podman", *choose_runtime(), *words]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


@dataclass
class Watched:
    """A followed job: its lines, with the time of each."""

    process: subprocess.Popen[str]
    lines: list[tuple[float, str]] = field(default_factory=list)
    thread: threading.Thread | None = None

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))

    def end(self, limit_s: float) -> str:
        """Wait for the command's end; return what it printed."""
        self.process.wait(limit_s)
        assert self.thread is not None
        self.thread.join()
        return "\n".join(line for _, line in self.lines)

    def steps(self) -> list[tuple[float, int]]:
        found = [(at, _STEP.search(line)) for at, line in list(self.lines)]
        return [(at, int(step[1])) for at, step in found if step]

    def wait_for_step(self, wanted: int) -> None:
        deadline = time.monotonic() + _LIMIT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            if any(step >= wanted for _, step in self.steps()):
                return
            time.sleep(0.2)
        raise RuntimeError("\n".join(line for _, line in self.lines))


class Recovery:
    """A cluster that loses something again and again."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder

    def argv(self, *words: str) -> list[str]:
        """Return a command line that names the cluster; a program and its arguments follow ``--``."""
        at = words.index("--") if "--" in words else len(words)
        return [*_CLI, *words[:at], "--name", self.name, *words[at:]]

    def cli(self, *words: str) -> str:
        argv = self.argv(*words)
        return subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True).stdout

    def ssh(self, node: str, command: str) -> str:
        argv = [*_CLI, "ssh", "--name", self.name, node, "--", command]
        return subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True).stdout

    def instance(self, node: str) -> str:
        nodes = json.loads(self.cli("status", "--json"))["nodes"]
        (instance,) = [each["instance"] for each in nodes if each["name"] == node]
        return str(instance)

    def container(self, node: str) -> str:
        """Return the name of a node's container."""
        instance = self.instance(node)
        listed = run_podman("ps", "--all", "--format={{.Names}}").split()
        (container,) = [each for each in listed if each.endswith(instance)]
        return container

    def podman(self, node: str, *words: str) -> str:
        """Run a command of podman on a node's container."""
        return run_podman(*words, self.container(node))

    def in_mounts(self, node: str, *command: str) -> None:
        """Run a command of a node that its own root may not run."""
        pid = self.podman(node, "inspect", "--format={{.State.Pid}}").strip()
        argv = ["nsenter", f"--target={pid}", "--mount", "--pid", *command]
        subprocess.run(argv, check=True, capture_output=True)

    def take_back(self, node: str) -> None:
        """Let EC2 take a spot machine back, after a notice of two minutes."""
        argv = [*_CLI, "local", "status", "--json"]
        done = subprocess.run(argv, cwd=ROOT, check=True, capture_output=True)
        faults = Path(json.loads(done.stdout)["folder"], "faults.toml")
        faults.write_text(f'[spot]\ninterrupt = ["{self.instance(node)}"]\n')

    def lose(self, loss: str) -> None:
        if loss == "rank":
            self.ssh("node1", f"pkill -KILL -f '{RANK}'")
        elif loss == "freeze":
            self.ssh("node1", f"pkill -STOP -f '{RANK}'")
        elif loss == "daemons":
            self.ssh("node1", "sudo pkill -KILL -x slurmd")
            self.ssh("node0", "sudo pkill -KILL -x slurmctld")
        elif loss == "spot":
            self.take_back("node1")
        elif loss == "disk":
            self.ssh("node1", f"head -c 400M /dev/zero > {_JOBS}/filler 2> /dev/null || true")
        else:
            self.podman("node0" if loss == "head" else "node1", "kill")

    def start(self, results: Path, *words: str) -> Watched:
        return self.watch(*_JOB, "--results", str(results), *words)

    def watch(self, *words: str) -> Watched:
        process = subprocess.Popen(
            self.argv(*words), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        job = Watched(process)
        job.thread = threading.Thread(target=job.read, daemon=True)
        job.thread.start()
        return job

    def measure(self, loss: str) -> dict[str, Any]:
        """Lose something while a job trains; return the figures."""
        results = self.folder / loss
        if loss == "disk":
            self.in_mounts("node1", *_MOUNT)
        job = self.start(results, *(["--elastic", "2"] if loss in ("elastic", "spot") else []))
        job.wait_for_step(_LOSE_AT)
        self.lose(loss)
        lost_at, before = time.monotonic(), max(step for _, step in job.steps())
        if loss == "worker":
            time.sleep(60)
            self.cli("repair", "--yes")
        elif loss == "disk":
            time.sleep(30)
            self.ssh("node1", f"rm {_JOBS}/filler")
        elif loss == "head":
            self.cli("repair", "--yes")
            job.process.wait(_LIMIT_S)
            (id_,) = {
                found[1] for _, line in job.lines if (found := re.search(r"job (squad-\S+)", line))
            }
            seen = job.lines
            job = self.watch("attach", id_, "--results", str(results))
            job.lines[:0] = seen
        job.end(_LIMIT_S)
        if loss == "disk":
            self.in_mounts("node1", "umount", "--lazy", _JOBS)
        return self._figures(job, results, lost_at, before)

    def _figures(self, job: Watched, results: Path, lost_at: float, before: int) -> dict[str, Any]:
        after = [(at, line) for at, line in job.lines if at > lost_at]
        noticed = next((at for at, line in after if _NOTICED.search(line)), None)
        resumed = next((at for at, line in after if "resuming after" in line), None)
        content = json.loads((results / "results.json").read_text())
        steps, log = content["resumed_after"], results / "job/log"
        return {
            "noticed_s": round(noticed - lost_at, 1) if noticed else None,
            "running_again_s": round(resumed - lost_at, 1) if resumed else None,
            # A step that is saved as the ranks stop is not in the log.
            "lost_steps": max(0, (last_step(log) or before) - steps[-1]) if steps else 0,
            "final_loss": content["loss_curve"][-1][1],
        }


def last_step(log: Path) -> int:
    """Return the last step that a log reports before the job started again; 0 if it does not know."""
    first, found, _ = log.read_text(errors="replace").partition('"event": "restarted"')
    steps = re.findall(r'"event": "step", "step": (\d+)', first)
    return int(steps[-1]) if found and steps else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument(
        "--name",
        required=True,
        help="a cluster of three nodes, which loses some; `spot` needs one of spot machines, and a server "
        "started with SPR_CLUSTER_LOCAL_APPLICATION=$PWD:tests.cloud.application",
    )
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=LOSSES)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        recovery = Recovery(args.name, Path(folder))
        whole = recovery.start(Path(folder, "whole"))
        whole.process.wait(_LIMIT_S)
        expected = json.loads(Path(folder, "whole", "results.json").read_text())["loss_curve"][-1][
            1
        ]
        found = {}
        for loss in args.losses:
            found[loss] = recovery.measure(loss)
            found[loss]["equal"] = found[loss]["final_loss"] == expected
            print(loss, found[loss], flush=True)
            recovery.cli("repair", "--yes")
    print(json.dumps({"benchmark": "recovery", "final_loss": expected, "losses": found}))


if __name__ == "__main__":
    main()
