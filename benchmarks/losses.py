"""Work that a loss must not cost, on a cluster of three nodes of the embedded cloud, with real jobs.

Each scenario ends with the work present, or with a message before the loss:

- `killed`: the batch process is killed with -9; the job resumes from its checkpoint.
- `fetch`: a laptop's full disk and a killed client leave no archive on the head and no truncated file here;
  four fetches at a time succeed.
- `logs`: programs that imitate the protocol, escape, flood, and never end a line, over SSH.
- `finished`: a job ends while a worker is cut off, and the head is lost; it does not run again.
- `idle`: a job waits for `repair` longer than the idle timeout; an idle cluster ends (needs
  `up --idle-timeout`, and is the cluster's end).
- `ttl`: the time to live of another cluster ends a job, which was said before.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import finish
from benchmarks.recovery import Recovery, Watched, run_podman
from tests.harness.hostile_text import HOSTILE
from tests.harness.processes import SUPERVISOR

_TRAIN = ("train", "squad", "--demo", "--epochs", "24", "--checkpoint-every", "7", "--retries", "1")
_LOSE_AT, _LIMIT_S = 20, 300
_STATE = "/run/spr-cluster"
_BIG_MB, _SMALL_MB, _FLOOD_MB = 200, 50, 16
BAR_MB_S = 10.0
_SAID_BEFORE = (
    "Nodes shut down automatically at",
    "training would end at about",
    "the job and its files end with them",
    "to keep them longer: spr-cluster extend",
)
# What the programs print, again and again; every other one fails. Their output is more than their text.
_PROGRAM = """import os, pathlib, sys
text, size, code = pathlib.Path(sys.argv[1]).read_bytes(), int(sys.argv[2]), int(sys.argv[3])
pathlib.Path(os.environ["SPR_OUTPUT"], "written").write_text(sys.argv[1])
sys.stdout.write("it begins\\n")
for _ in range(size // len(text)):
    sys.stdout.buffer.write(text)
sys.stdout.write("\\nit ends\\n")
sys.stdout.flush()
sys.exit(code)
"""


class Losses(Recovery):
    """A cluster, and what its scenarios missed."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name, folder)
        self.missed: list[str] = []
        self.figures: dict[str, Any] = {}

    def require(self, good: bool, what: str) -> None:
        if not good:
            print(f"MISSED: {what}", flush=True)
            self.missed.append(what)

    def start_cli(self, *words: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.argv(*words), cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def submit(self, *words: str) -> str:
        at = words.index("--") if "--" in words else len(words)
        said = self.cli(*words[:at], "--detach", "--json", *words[at:])
        return str(json.loads(said)["job"])

    def state(self, job: str) -> str:
        jobs = json.loads(self.cli("jobs", "--json"))["jobs"]
        return next((str(each["state"]) for each in jobs if each["job"] == job), "")

    def wait_for_state(self, job: str, *states: str) -> str:
        deadline = time.monotonic() + _LIMIT_S
        while (state := self.state(job)) not in states and time.monotonic() < deadline:
            time.sleep(1)
        self.require(state in states, f"{job} is {state or 'unknown'}, not {' or '.join(states)}")
        return state

    def require_resumed(self, job: Watched, results: Path, what: str) -> None:
        text = job.end(_LIMIT_S)
        self.require(job.process.returncode == 0, f"{what}: exit code {job.process.returncode}")
        self.require(bool(re.search(r"resuming after step \d+", text)), f"{what}: it began again")
        self.require((results / "model").is_dir(), f"{what}: there is no model")

    def killed(self) -> None:
        results = self.folder / "killed"
        job = self.watch(*_TRAIN, "--results", str(results))
        job.wait_for_step(_LOSE_AT)
        self.ssh("node0", f"pkill -KILL -f '{SUPERVISOR}'")
        self.require_resumed(job, results, "batch process killed")

    def fetch(self) -> None:
        fill = f"head -c {_BIG_MB}M /dev/urandom > $SPR_OUTPUT/big"
        job = self.submit("run", "--nodes", "1", "--", "sh", "-c", fill)
        self.wait_for_state(job, "succeeded")
        large = f"-type f -size +{_SMALL_MB // 2}M -newer spr-jobs/{job}/run.sh"
        head = f"find ~ /tmp /var/tmp -xdev {large} || true"
        before = self.ssh("node0", head)
        self.require(f"{job}/output/big" in before, f"the search missed the result: {before}")
        small = self.folder / "small"
        small.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={_SMALL_MB}m", "tmpfs", str(small)]
        subprocess.run(mount, check=True)
        try:
            self._fail_to_fetch(job, small / "results")
        finally:
            subprocess.run(["umount", str(small)], check=True)
        cut = self.folder / "cut"
        process = self.start_cli("fetch", job, "--results", str(cut))
        while process.poll() is None and not any(
            each.stat().st_size for each in cut.rglob("*big*")
        ):
            time.sleep(0.05)
        self.require(process.poll() is None, "the fetch ended before it was killed")
        process.kill()
        process.wait()
        self.require(not (cut / "big").exists(), "a killed fetch left a truncated file")
        targets = [self.folder / f"fetch-{number}" for number in range(4)]
        together = [self.start_cli("fetch", job, "--results", str(each)) for each in targets]
        codes = [(each.communicate(), each.returncode)[1] for each in together]
        self.require(codes == [0] * 4, f"four fetches at a time ended with {codes}")
        wanted = self.ssh("node0", f"sha256sum < spr-jobs/{job}/output/big").split()[0]
        found = {
            hashlib.sha256(path.read_bytes()).hexdigest()
            for path in self.folder.glob("fetch-*/**/big")
        }
        self.require(found == {wanted}, "four fetches at a time: the files differ")
        self.require(
            self.ssh("node0", head) == before, f"left on the head: {self.ssh('node0', head)}"
        )

    def _fail_to_fetch(self, job: str, results: Path) -> None:
        process = self.start_cli("fetch", job, "--results", str(results))
        said = process.communicate()[0].decode()
        self.require(process.returncode == 1, f"full disk here: exit code {process.returncode}")
        self.require("No space left on device" in said, f"full disk here: {said}")
        sizes = {path.name: path.stat().st_size for path in results.rglob("*") if path.is_file()}
        self.require(
            "big" not in sizes and max(sizes.values(), default=0) < 1 << 20,
            f"full disk here: {sizes}",
        )

    def logs(self) -> None:
        program = self.folder / "hostile.py"
        program.write_text(_PROGRAM)
        rates, cpu_rates = list[float](), list[float]()
        for number, text in enumerate(HOSTILE):
            file, code = self.folder / f"text-{number}", 3 * (number % 2)
            file.write_bytes(text)
            cpu_before = os.times()
            rates.append(self._flood(program, file, code))
            cpu = os.times()
            spent = sum(cpu[2:4]) - sum(cpu_before[2:4])
            cpu_rates.append(_FLOOD_MB / spent)
            print(
                f"text {number}: {rates[-1]:.1f} MB/s, {cpu_rates[-1]:.1f} per second of the client's CPU",
                flush=True,
            )
        self.figures["logs_mb_per_s"] = [round(each, 1) for each in rates]
        self.figures["logs_mb_per_cpu_s"] = [round(each, 1) for each in cpu_rates]
        self.require(min(rates) >= BAR_MB_S, f"logs: {min(rates):.1f} MB/s, the bar is {BAR_MB_S}")

    def _flood(self, program: Path, file: Path, code: int) -> float:
        """Run a hostile program; return the MB of its text that arrived per second."""
        results, size = self.folder / f"{file.name}-results", _FLOOD_MB * 1_000_000
        files = ("--files", file.name, "--results", str(results))
        argv = ("python", program.name, file.name, str(size), str(code))
        process = self.start_cli("run", "--nodes", "1", *files, "--", *argv)
        assert process.stdout is not None
        begin = end = 0.0
        shown = bytearray()
        while chunk := process.stdout.read1(1 << 20):  # type: ignore[attr-defined]
            begin = begin or (time.monotonic() if b"it begins" in (shown[-20:] + chunk) else 0.0)
            end = end or (time.monotonic() if b"it ends" in (shown[-20:] + chunk) else 0.0)
            shown += chunk
        process.wait()
        what = f"{file.name}, {file.read_bytes()[:40]!r}"
        wanted = 1 if code else 0
        self.require(
            process.returncode == wanted,
            f"{what}: exit code {process.returncode}: {shown[-500:]!r}",
        )
        self.require(b"Traceback" not in shown, f"{what}: {shown[-500:]!r}")
        self.require(bool(begin and end), f"{what}: its first and last line are not shown")
        record = json.loads((results / "job/job.json").read_text())
        self.require(record["exit_code"] == code, f"{what}: recorded as {record['exit_code']}")
        self.require(
            (results / "written").read_text() == file.name, f"{what}: its output is missing"
        )
        return size / 1e6 / max(end - begin, 1e-3)

    def finished(self) -> None:
        job = self.submit(
            "run",
            "--nodes",
            "1",
            "--retries",
            "1",
            "--",
            "sh",
            "-c",
            "sleep 10; date > $SPR_OUTPUT/done",
        )
        self.wait_for_state(job, "running")
        self.podman("node1", "pause")
        self.wait_for_state(job, "succeeded")
        results = self.folder / "finished"
        self.cli("fetch", job, "--results", str(results))
        self.podman("node1", "unpause")
        self.podman("node0", "kill")
        said = self.start_cli("repair", "--yes").communicate()[0].decode()
        self.require("starts again" not in said, f"a finished job starts again: {said}")
        state = self.state(job)
        self.require(state in ("succeeded", ""), f"a finished job is {state} after the head's loss")
        self.require((results / "done").exists(), "the finished job's results are missing")

    def idle(self) -> None:
        results = self.folder / "idle"
        job = self.submit(*_TRAIN)
        followed = self.watch("attach", job, "--results", str(results))
        followed.wait_for_step(_LOSE_AT)
        followed.process.kill()
        self.podman("node2", "kill")
        self.wait_for_state(job, "requeued")
        self._pass_idle_timeout(("node0", "node1"))
        self.require(
            self.alive() == 2, "the idle timeout ended a cluster whose job waits for `repair`"
        )
        self.cli("repair", "--yes")
        self.require_resumed(
            self.watch("attach", job, "--results", str(results)), results, "idle timeout"
        )
        self._pass_idle_timeout(("node0", "node1", "node2"))
        self.require(self.alive() == 0, "an idle cluster did not end")

    def ttl(self) -> None:
        short = Losses(f"{self.name}-ttl", self.folder)
        short.cli("up", "--cloud", "local", "--nodes", "1", "--ttl", "3m", "--yes")
        job = short.watch(
            "train", "squad", "--demo", "--epochs", "9000", "--results", str(self.folder / "ttl")
        )
        said = job.end(_LIMIT_S)
        for text in _SAID_BEFORE:
            self.require(text in said, f"before the end of --ttl, {text!r} was not said")
        self.require("time to live was over" in said, f"after the end of --ttl: {said[-500:]}")
        repair = short.start_cli("repair", "--yes")
        advice = repair.communicate()[0].decode()
        self.require(
            repair.returncode != 0 and "spr-cluster up" in advice,
            f"repair without machines: {advice}",
        )
        short.cli("down", "--yes")

    def _pass_idle_timeout(self, nodes: Sequence[str]) -> None:
        # Not over SSH, which a node counts as use.
        head, *others = map(self.container, nodes)
        for container in (*others, head):
            run_podman("exec", container, "touch", "--date=-1 hour", f"{_STATE}/last-busy")
        run_podman("exec", head, "systemctl", "start", "--no-block", "spr-cluster-idle.service")
        time.sleep(15)

    def alive(self) -> int:
        nodes = json.loads(self.cli("status", "--json"))["nodes"]
        return sum(each["state"] == "running" for each in nodes)


SCENARIOS = ("killed", "fetch", "logs", "finished", "idle", "ttl")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument(
        "--name", required=True, help="a cluster of three nodes of the embedded cloud"
    )
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=SCENARIOS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        losses = Losses(args.name, Path(folder))
        for name in args.scenarios:
            begin, missed = time.monotonic(), len(losses.missed)
            scenario: Callable[[], None] = getattr(losses, name)
            try:
                scenario()
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                said = getattr(error, "stderr", "")
                losses.require(False, f"{name}: {error} {said}")
            losses.figures[f"{name}_s"] = round(time.monotonic() - begin)
            print(f"{name}: {'FAILED' if len(losses.missed) > missed else 'passed'}", flush=True)
    finish(losses.missed, benchmark="losses", **losses.figures)


if __name__ == "__main__":
    main()
