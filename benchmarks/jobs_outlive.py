"""Jobs that outlive the laptop, on a cluster of three nodes that is there.

(a) The client of a training job is killed (SIGKILL) at random moments, and each time another one attaches,
from a new home folder that has only the cluster's key. Every client must receive the log on the head from
its first line on, without a gap, the last one all of it, and the model must be that of an undisturbed run,
byte by byte. (b) Jobs are cancelled at random moments; no process of them may be left on any node 10 s
later. (c) Jobs of random sizes and lengths are queued while the head's services are killed; all must
succeed, no two at once on one node, and those on the same nodes in the order of their submission.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import combinations, zip_longest
from pathlib import Path
from typing import Any

from benchmarks.common import finish
from cluster.local_files import home
from tests.e2e.conftest import CommandLine

BAR_S = 10.0
NODES = 3
SERVICES = ("slurmctld", "slurmd", "munge")
_LONGEST_ATTACH_S, _LONGEST_WAIT_S, _DEADLINE_S = 15.0, 12.0, 900
# The command line itself, which also prints each line of the job's log as it receives it.
_CLIENT = """import sys
from jobs.__main__ import main
from jobs.launchers.queue.job_output import JobOutput
shown = JobOutput.add_line
def add_line(self, line):
    print("@received", line, flush=True)
    shown(self, line)
JobOutput.add_line = add_line
sys.exit(main())
"""
_RECEIVED = "@received "
# Everything that a job started has its folder as working directory, or its name from Slurm.
_FIND = """import pathlib, socket
for process in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        is_there = "/spr-jobs/@JOB" in str((process / "cwd").resolve())
        variables = (process / "environ").read_bytes().split(b"\\0")
        if is_there or b"SLURM_JOB_NAME=@JOB" in variables:
            print(socket.gethostname(), (process / "cmdline").read_bytes().replace(b"\\0", b" "))
    except OSError:
        pass
"""


@dataclass
class Bench:
    """The cluster, the options that name it, and what was missed so far."""

    cli: CommandLine
    name: str
    cloud: str
    root: Path
    random: random.Random
    missed: list[str] = field(default_factory=list)
    rows: list[tuple[str, str]] = field(default_factory=list)

    @property
    def options(self) -> tuple[str, ...]:
        return ("--name", self.name, "--cloud", self.cloud)

    def other_laptop(self) -> CommandLine:
        """Return a command line with a new home folder, which has only the cluster's key."""
        folder = Path(tempfile.mkdtemp(dir=self.root, prefix="laptop-"))
        (folder / self.name).mkdir()
        for key in (self.cli.home / self.name).glob("id_ed25519*"):
            shutil.copy2(key, folder / self.name)
        return replace(
            self.cli, home=folder, cloud=self.cli.cloud or self.cli.home / ".local-cloud"
        )

    def on_head(self, script: str) -> str:
        return self.cli.run("ssh", *self.options, "node0", "--", script).stdout

    def processes(self, job: str) -> str:
        """Return the processes of a job on all nodes, or that a node could not be asked."""
        # As the jobs' user: root without CAP_SYS_PTRACE, as in containers, sees less.
        script = f"python3 -c {shlex.quote(_FIND.replace('@JOB', job))}"
        ask = f"ssh -n $node {shlex.quote(script)} || echo $node can not be asked"
        return self.on_head(f"for node in $(cat ~/hosts); do {ask}; done")

    def jobs(self) -> list[dict[str, Any]]:
        """Return all jobs, in the order of submission."""
        found: list[dict[str, Any]] = self.cli.json("jobs", *self.options)["jobs"]
        return found

    def job(self, name: str) -> dict[str, Any]:
        return next(job for job in self.jobs() if job["job"] == name)

    def require(self, good: bool, what: str) -> None:
        if not good:
            print(f"MISSED: {what}", file=sys.stderr, flush=True)
            self.missed.append(what)

    def note(self, what: str, figure: object) -> None:
        self.rows.append((what, str(figure)))
        print(f"{what}: {figure}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--name", required=True, help="a cluster of three nodes, without jobs")
    parser.add_argument("--cloud", choices=("aws", "local"), default="local")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--cancels", type=int, default=50)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--epochs", default="20", help="of the jobs of --kills (default: 20)")
    parser.add_argument("--seed", type=int, default=16)
    args = parser.parse_args()
    cli = CommandLine(home().absolute(), Path(sys.executable).parent)
    with tempfile.TemporaryDirectory() as root:
        bench = Bench(cli, args.name, args.cloud, Path(root), random.Random(args.seed))
        nodes = len(cli.json("status", *bench.options)["nodes"])
        bench.require(nodes == NODES, f"the cluster has {nodes} nodes instead of {NODES}")
        if args.kills:
            kill_clients(bench, args.kills, args.epochs)
        if args.cancels:
            cancel_jobs(bench, args.cancels)
        if args.jobs:
            queue_jobs(bench, args.jobs)
    width = max(len(what) for what, _ in bench.rows)
    print("\n".join(f"{what:{width}}  {figure}" for what, figure in bench.rows))
    finish(bench.missed, benchmark="jobs_outlive", seed=args.seed, figures=dict(bench.rows))


def kill_clients(bench: Bench, kills: int, epochs: str) -> None:
    """Bar 1: kill clients of as many jobs as it takes, and compare the models."""
    train = ("train", "squad", "--demo", "--epochs", epochs, *bench.options)
    calm = bench.root / "calm"
    bench.cli.run(*train, "--results", str(calm))
    wanted = digest(calm / "model")
    done, equal, jobs, lines = 0, 0, 0, 0
    while done < kills:
        jobs += 1
        results = bench.root / f"disturbed-{jobs}"
        killed, received = disturb(bench, train, kills - done, results)
        done, lines = done + killed, lines + received
        equal += digest(results / "model") == wanted
    bench.require(equal == jobs, "a model differs from the undisturbed run's")
    bench.note("clients killed", done)
    bench.note("log lines that all clients received", lines)
    bench.note("models equal to the undisturbed run's", f"{equal} of {jobs}")


def disturb(bench: Bench, train: Sequence[str], kills: int, results: Path) -> tuple[int, int]:
    """Run one job to its end; return how many of its clients were killed, and the lines they received."""
    first = Client(bench.cli, [*train, "--results", f"{results}-0"])
    first.watch_until(_RECEIVED)
    first.watch(bench.random.uniform(0, _LONGEST_ATTACH_S))
    found = re.search(r"squad-\d{8}-\d{6}-\w{3}", first.text)
    assert found, first.text
    clients, job = [first], found[0]
    while len(clients) < kills and bench.job(job)["state"] == "running":
        to = ("--results", f"{results}-{len(clients)}")
        clients.append(Client(bench.other_laptop(), ["attach", job, *bench.options, *to]))
        clients[-1].watch(bench.random.uniform(0, _LONGEST_ATTACH_S))
    to = ("--results", str(results))
    last = Client(bench.other_laptop(), ["attach", job, *bench.options, *to])
    last.watch(_DEADLINE_S)
    bench.require(last.process.returncode == 0, f"the last attach: {last.text[-500:]}")
    log = (results / "log").read_text().splitlines()
    for client in (*clients, last):
        compare(bench, client, log)
    killed = sum(client.was_killed for client in clients)
    return killed, sum(client.text.count(_RECEIVED) for client in (*clients, last))


class Client:
    """A command that follows a job, and what it has printed."""

    def __init__(self, cli: CommandLine, argv: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CLIENT, *argv],
            env=cli.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,  # `communicate` would not see what `readline` has read ahead
        )
        self.text = ""

    @property
    def was_killed(self) -> bool:
        return self.process.returncode == -signal.SIGKILL

    def watch_until(self, text: str) -> None:
        """Read lines until one contains this text."""
        assert self.process.stdout is not None
        while text not in self.text and (line := self.process.stdout.readline()):
            self.text += line.decode()

    def watch(self, seconds: float) -> None:
        """Read until the command ends; kill it after some seconds."""
        try:
            self.text += self.process.communicate(timeout=seconds)[0].decode()
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.text += self.process.communicate()[0].decode(errors="replace")


def compare(bench: Bench, client: Client, log: Sequence[str]) -> None:
    """Require that a client received the log's lines, each once and in order: all, unless it was killed."""
    *whole, _ = client.text.split("\n")
    seen = [line[len(_RECEIVED) :] for line in whole if line.startswith(_RECEIVED)]
    good = seen == [*log[: len(seen)]] and (client.was_killed or len(seen) == len(log))
    print(f"  a client received {len(seen)} of {len(log)} lines", file=sys.stderr, flush=True)
    pairs = zip_longest(seen, log)
    differ = next(((a, b) for a, b in pairs if a != b), "none, but the end is missing")
    bench.require(good, f"lost or doubled lines; the first difference (received, log): {differ}")


def digest(folder: Path) -> str:
    """Return a digest of a folder's files: their names and bytes."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert files, folder
    each = [hashlib.sha256(path.read_bytes()).hexdigest() + path.name for path in files]
    return hashlib.sha256("\n".join(each).encode()).hexdigest()


def cancel_jobs(bench: Bench, count: int) -> None:
    """Bar 3, first half: cancel jobs, and look for their processes on every node."""
    clean = seen = 0
    train = ("train", "squad", "--demo", "--epochs", "10000", "--detach", *bench.options)
    for number in range(count):
        job = bench.cli.json(*train)["job"]
        time.sleep(bench.random.uniform(0, _LONGEST_WAIT_S))
        seen += bool(bench.processes(job))
        now = ("--now",) if bench.random.random() < 0.5 else ()
        begin = time.monotonic()
        bench.cli.run("cancel", job, *now, *bench.options)
        cancelled = time.monotonic()
        while (left := bench.processes(job)) and time.monotonic() - cancelled < BAR_S:
            time.sleep(0.5)
        clean += not left
        bench.require(not left, f"10 s after the cancel of {job} {now}: {left}")
        state = bench.job(job)["state"]
        bench.require(state == "cancelled", f"{job} was cancelled and is {state}")
        took = f"{cancelled - begin:.1f} s, then {time.monotonic() - cancelled:.1f} s"
        print(f"  cancel {number + 1} {' '.join(now)}: {took}", file=sys.stderr, flush=True)
    # Or else the search finds nothing at all.
    bench.require(seen > 0, "no job had a process when it was cancelled")
    bench.note("cancelled jobs that had processes", f"{seen} of {count}")
    bench.note("cancelled jobs that left no process", f"{clean} of {count}")


def queue_jobs(bench: Bench, count: int) -> None:
    """Bar 3, second half: a queue at random, with the head's services killed in between."""
    names: list[str] = []
    kills = dict(
        zip(bench.random.sample(range(count), min(count, len(SERVICES))), SERVICES, strict=False)
    )
    for number in range(count):
        size, seconds = bench.random.randint(1, NODES), bench.random.randint(5, 25)
        run = ("run", "--nodes", str(size), "--detach", "--json", *bench.options)
        submitted = bench.cli.run(*run, "--", "sleep", str(seconds))
        names.append(json.loads(submitted.stdout)["job"])
        if number in kills:
            unit = kills[number]
            bench.on_head(f"sudo kill -9 $(systemctl show --property=MainPID --value {unit})")
            print(f"  {unit} killed after job {number + 1}", file=sys.stderr, flush=True)
    for name in names:
        bench.cli.run("wait", name, *bench.options, "--timeout", str(_DEADLINE_S), check=None)
    done = [job for job in bench.jobs() if job["job"] in names]
    ended = [job for job in done if job["state"] == "succeeded"]
    bench.note("queued jobs that succeeded", f"{len(ended)} of {count}")
    bench.require(len(ended) == count, f"states: {[job['state'] for job in done]}")
    ended.sort(key=lambda job: names.index(job["job"]))
    wrong = [
        f"{a['job']} and {b['job']}: {why}"
        for a, b in combinations(ended, 2)
        if (why := judge(a, b))
    ]
    bench.require(not wrong, f"out of order: {wrong}")
    side_by_side = sum(overlap(a, b) for a, b in combinations(ended, 2))
    bench.note("pairs out of order, or at once on one node", len(wrong))
    bench.note("pairs side by side on disjoint nodes", side_by_side)


def judge(first: dict[str, Any], second: dict[str, Any]) -> str:
    """Return what is wrong with two jobs in the order of their submission; "" if nothing is."""
    same = set(first["nodes"]) & set(second["nodes"])
    if same and overlap(first, second):
        return f"both at once on {', '.join(sorted(same))}"
    is_late = first["nodes"] == second["nodes"] and first["began"] > second["began"]
    return "the later one began first" if is_late else ""


def overlap(first: dict[str, Any], second: dict[str, Any]) -> bool:
    spans = [
        [datetime.fromisoformat(job[key]) for key in ("began", "ended")] for job in (first, second)
    ]
    return max(span[0] for span in spans) < min(span[1] for span in spans)


if __name__ == "__main__":
    main()
