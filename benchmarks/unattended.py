"""Jobs whose cluster ends before them, and jobs that nobody watches, on the embedded cloud.

`python -m benchmarks.unattended [--minutes 10] [--ttl 4] [--runs 10] [--only bucket …]`

A job of ten minutes on two nodes that live for four: `bucket` resumes it from S3 on a new cluster, to
the model of an undisturbed job; `grace` fetches what is there after the deadline; `until-done` finishes.
Then `alone`: a job is submitted with `--detach --down-when-done --bucket`, its client killed and its
home folder deleted. A minute after the job's end there must be no machine and nothing billed; another
laptop gets model, log, and record, and its `down` removes the free rest. Some runs fail to store, are
denied by the bucket, or lose the head. Bills are for the time of the nodes, at the price of
r7iz.metal-16xl.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.common import finish
from tests.e2e.conftest import CommandLine

USD_PER_HOUR = 6.5472
GONE_S, LATE_S = 60.0, 90.0
"""The bar from the end of a job to that of its nodes, and from a deadline, which nodes look at every 30 s."""
LOCAL = ("--cloud", "local")
BUCKET = "runs"
SCENARIOS = ("bucket", "grace", "until-done", "alone")
JOB = ("train", "squad", "--demo", "--checkpoint-every", "20")
_EPOCHS = 20
_JOB_ID = re.compile(r"squad-\d{8}-\d{6}-\w{3}")
# Each run's fault: the calls of S3 that fail, or a killed machine.
_FAULTS = {
    "failed push": '[[error]]\naction = "PutObject"\ncode = "SlowDown"\ntimes = 40\n',
    "denied": '[[error]]\naction = "PutObject"\ncode = "AccessDenied"\nstatus = 403\ntimes = 100000\n',
}
_RUNS = ("", "failed push", "", "killed head", "", "denied", "", "failed push", "", "")


@dataclass
class Bench:
    """The embedded cloud, the length of the jobs, and what was missed so far."""

    root: Path
    ttl: int
    epochs: int = 0
    model: str = ""
    missed: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def cloud(self) -> Path:
        return self.root / "cloud"

    def laptop(self) -> CommandLine:
        """Return a command line with a new home folder: another laptop of the same user."""
        return CommandLine(Path(tempfile.mkdtemp(dir=self.root, prefix="laptop-")), self.cloud)

    def require(self, good: bool, what: str) -> None:
        if not good:
            print(f"MISSED: {what}", file=sys.stderr, flush=True)
            self.missed.append(what)

    def note(self, scenario: str, **figures: Any) -> None:
        self.rows.append({"scenario": scenario, **figures})
        print(f"{scenario}: {figures}", file=sys.stderr, flush=True)

    @contextmanager
    def faults(self, text: str) -> Iterator[None]:
        path = self.cloud / "faults.toml"
        path.write_text(text)
        try:
            yield
        finally:
            path.unlink()


@dataclass
class Nodes:
    """A cluster's machines, and when they were made."""

    bench: Bench
    cli: CommandLine
    name: str
    begun: float
    ids: list[str]

    @property
    def options(self) -> tuple[str, ...]:
        return ("--name", self.name, *LOCAL)

    def wait_until_gone(self, limit_s: float) -> float:
        """Return when the last machine had ended."""
        end = time.time() + limit_s
        while running := self.containers():
            if time.time() > end:
                self.bench.require(False, f"{self.name}: {running} still there")
                break
            time.sleep(0.5)
        return time.time()

    def containers(self) -> list[str]:
        """Return the containers of the machines that run, the head's first."""
        argv = ["podman", "ps", "--format={{.Names}}"]
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
        names = done.stdout.split()
        return [name for id_ in self.ids for name in names if name.endswith(id_)]

    def bill(self, ended: float) -> float:
        return round(len(self.ids) * (ended - self.begun) / 3600 * USD_PER_HOUR, 2)


def up(bench: Bench, name: str, *options: str) -> Nodes:
    cli = bench.laptop()
    begun = time.time()
    result = cli.json("up", "--name", name, "--nodes", "2", *LOCAL, *options)
    return Nodes(bench, cli, name, begun, [node["instance"] for node in result["nodes"]])


def train(nodes: Nodes, *options: str, check: int | None = 0) -> tuple[str, str]:
    """Train; return the job's ID and what was printed."""
    epochs = ("--epochs", str(nodes.bench.epochs))
    done = nodes.cli.run(*JOB, *epochs, *nodes.options, *options, check=check)
    said = done.stdout + done.stderr
    found = _JOB_ID.search(said)
    assert found, said
    return found[0], said


def digest(folder: Path) -> str:
    """Return the digest of a fetched model's weights; "" without any."""
    found = sorted((folder / "model").glob("*.safetensors"))
    return hashlib.sha256(found[0].read_bytes()).hexdigest() if found else ""


def run_undisturbed(bench: Bench, minutes: float) -> None:
    """Make the image of all clusters, and the job's length and model."""
    nodes = up(bench, "calm", "--ttl", "3h")
    folder = bench.root / "calm"

    def measure(epochs: int) -> float:
        shutil.rmtree(folder, ignore_errors=True)
        bench.epochs = epochs
        train(nodes, "--results", str(folder))
        return float(json.loads((folder / "job/job.json").read_text())["seconds"])

    seconds = measure(_EPOCHS)
    if minutes:
        # The difference of two jobs leaves out what every job needs for its start; the first needs more.
        seconds = measure(_EPOCHS)
        each = (measure(6 * _EPOCHS) - seconds) / (5 * _EPOCHS)
        seconds = measure(round(_EPOCHS + (minutes * 60 - seconds) / each))
    bench.model = digest(folder)
    job = json.loads((folder / "job/job.json").read_text())["job"]
    bench.note("undisturbed", job=job, epochs=bench.epochs, seconds=seconds)
    nodes.cli.run("down", *nodes.options, "--yes", "--keep-image")


def run_bucket(bench: Bench) -> None:
    place = f"s3://{BUCKET}/short"
    nodes = up(bench, "short", "--ttl", f"{bench.ttl}m", "--bucket", place)
    job, said = train(nodes, check=None)
    bench.require("warning" in said, "no warning that the job ends after its nodes")
    ended = nodes.wait_until_gone(bench.ttl * 60 + LATE_S)
    nodes.cli.run("down", *nodes.options, "--yes")
    again = up(bench, "next", "--ttl", "2h", "--bucket", place)
    folder = bench.root / "resumed"
    resume = ("--resume", f"{place}/{job}", "--results", str(folder))
    said = again.cli.run("train", "squad", *resume, *again.options).stderr
    step = re.search(r"resumes from step-(\d+)", said)
    bench.require(step is not None, f"not resumed from a checkpoint: {said[-300:]}")
    bench.require(digest(folder) == bench.model, "the resumed model differs")
    again.cli.run("down", *again.options, "--yes", "--keep-image")
    bill = nodes.bill(ended) + again.bill(time.time())
    bench.note("bucket", job=job, step=step and int(step[1]), usd=round(bill, 2))


def run_grace(bench: Bench) -> None:
    nodes = up(bench, "kept", "--ttl", f"{bench.ttl}m", "--grace", "3m")
    job, said = train(nodes, check=None)
    bench.require("warning" in said, "no warning that the job ends after its nodes")
    time.sleep(max(0.0, nodes.begun + bench.ttl * 60 + 45 - time.time()))
    folder = bench.root / "late"
    nodes.cli.run("fetch", job, *nodes.options, "--results", str(folder))
    bench.require((folder / "job/log").is_file(), "nothing was fetched in the grace period")
    ended = nodes.wait_until_gone((bench.ttl + 3) * 60 + LATE_S)
    nodes.cli.run("down", *nodes.options, "--yes")
    bench.note(
        "grace", job=job, minutes=round((ended - nodes.begun) / 60, 1), usd=nodes.bill(ended)
    )


def run_until_done(bench: Bench) -> None:
    limits = ("--ttl", f"{bench.ttl}m", "--grace", "2m", "--max-hours", "1")
    nodes = up(bench, "longer", *limits)
    folder = bench.root / "done"
    job, _ = train(nodes, "--until-done", "--results", str(folder))
    bench.require(digest(folder) == bench.model, "the model of --until-done differs")
    ended = nodes.wait_until_gone(180 + LATE_S)
    nodes.cli.run("down", *nodes.options, "--yes")
    bench.note("until-done", job=job, usd=nodes.bill(ended))


def run_alone(bench: Bench, number: int, fault: str) -> float | None:
    """Do one unattended run; return the seconds from the job's end to that of the machines."""
    place = f"s3://{BUCKET}/alone{number}"
    nodes = up(bench, f"alone{number}", "--ttl", "5m", "--grace", "2m", "--bucket", place)
    client = nodes.cli.start(
        *JOB, "--epochs", str(bench.epochs), *nodes.options, "--detach", "--down-when-done"
    )
    text, _ = client.communicate(timeout=300)
    found = _JOB_ID.search(text)
    assert found, text
    job = found[0]
    shutil.rmtree(nodes.cli.home)
    if fault == "killed head":
        time.sleep(15)
        subprocess.run(["podman", "kill", nodes.containers()[0]], check=True, capture_output=True)
    with bench.faults(_FAULTS.get(fault, "")):
        ended = nodes.wait_until_gone(420 + LATE_S)
    other, folder = bench.laptop(), bench.root / f"alone-{number}"
    done = other.run("fetch", f"{place}/{job}", *LOCAL, "--results", str(folder), check=None)
    passed = None
    if fault in ("", "failed push"):
        bench.require(done.returncode == 0, f"alone {number}: {done.stderr[-300:]}")
    if fault in ("", "failed push") and done.returncode == 0:
        bench.require(digest(folder) == bench.model, f"alone {number}: another model")
        record = json.loads((folder / "job/job.json").read_text())
        bench.require((folder / "job/log").stat().st_size > 0, f"alone {number}: no log")
        passed = ended - datetime.fromisoformat(record["ended"]).timestamp()
        bench.require(passed <= GONE_S or bool(fault), f"alone {number}: gone after {passed:.0f} s")
    # A cluster as new as this may be one whose machines are still being bought.
    free = {"security_groups", "placement_groups", "key_pairs"}
    billed = {*other.json("status", *nodes.options)["resources"]} - free
    bench.require(not billed, f"alone {number}: left: {billed}")
    other.run("down", *nodes.options, "--yes")
    left = [row["cluster"] for row in other.json("list", *LOCAL)["clusters"]]
    bench.require(nodes.name not in left, f"alone {number}: left after down: {left}")
    bench.note("alone", number=number, fault=fault, gone_s=passed, usd=nodes.bill(ended))
    return passed


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=10, help="length of the long jobs")
    parser.add_argument("--ttl", type=int, default=4, help="minutes that their nodes live")
    parser.add_argument("--runs", type=int, default=len(_RUNS), help="unattended runs")
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=SCENARIOS)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), args.ttl)
        cli = bench.laptop()
        try:
            cli.run("local", "bucket", BUCKET)
            if {*args.only} - {"alone"}:
                run_undisturbed(bench, args.minutes)
            for scenario, run in (
                ("bucket", run_bucket),
                ("grace", run_grace),
                ("until-done", run_until_done),
            ):
                if scenario in args.only:
                    run(bench)
            passed = []
            if "alone" in args.only and args.runs:
                run_undisturbed(bench, 0)
                passed = [run_alone(bench, n, _RUNS[n % len(_RUNS)]) for n in range(args.runs)]
            gone = [round(each, 1) for each in passed if each is not None]
            median = statistics.median(gone) if gone else None
            finish(
                bench.missed, benchmark="unattended", gone_s=gone, median_s=median, rows=bench.rows
            )
        finally:
            cli.run("local", "reset", "--keep-base")


if __name__ == "__main__":
    main()
