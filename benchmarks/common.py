"""Shared by the benchmarks: a fresh clone, a timed command, leftovers, the closing JSON line."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

Cloud = TypeVar("Cloud")
Point = TypeVar("Point")

ROOT = Path(__file__).resolve().parent.parent


def run_timed(
    argv: Sequence[str], cwd: Path, deadline_s: float, **environment: str
) -> tuple[float, str]:
    """Run a command, show its output as it comes, and return its seconds and that output.

    Raises :class:`subprocess.CalledProcessError` where it fails.
    """
    start = time.monotonic()
    lines: list[str] = []
    with subprocess.Popen(
        argv,
        cwd=cwd,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
        code = process.wait(timeout=deadline_s)
    if code:
        raise subprocess.CalledProcessError(code, list(argv))
    return time.monotonic() - start, "".join(lines)


def clone(target: Path) -> Path:
    """Clone the last commit."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(target)], check=True)
    return target


def left_behind() -> dict[str, list[str]]:
    """Return what embedded clouds of any home folder left on this machine, except base images."""
    commands = {
        "containers": ["podman", "ps", "--all", "--format", "{{.Names}}"],
        "networks": ["podman", "network", "ls", "--format", "{{.Name}}"],
        "images": ["podman", "images", "--format", "{{.Repository}}:{{.Tag}}"],
        "processes": ["pgrep", "-af", "infra.local.api.server"],
    }
    found = {}
    for kind, argv in commands.items():
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        found[kind] = [line for line in done.stdout.splitlines() if _is_ours(kind, line)]
    return found


def _is_ours(kind: str, line: str) -> bool:
    return kind == "processes" or ("spr-" in line and "base" not in line)


def run_shares(module: str, options: Sequence[str], jobs: int) -> list[Any]:
    """Run a benchmark's work in several processes, and return each one's last line.

    Each is the module itself, told its share by ``--job``.
    """
    command = [sys.executable, "-m", module, *options, f"--jobs={jobs}"]
    running = [
        subprocess.Popen([*command, f"--job={job}"], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for job in range(jobs)
    ]
    answers = [process.communicate()[0] for process in running]
    for process in running:
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
    return [json.loads(answer.splitlines()[-1]) for answer in answers]


def choose(points: Sequence[Point], every: int) -> Sequence[Point]:
    """Return every N-th point, at least one, and not from the first on, which is less telling."""
    return points[min(every, len(points)) // 2 :: every]


def run_sweep(
    module: str,
    doc: str | None,
    scenarios: Sequence[str],
    open_cloud: Callable[[Path], AbstractContextManager[Cloud]],
    sweep: Callable[[Cloud, Path, str, int, int, int], dict[str, Any]],
) -> dict[str, dict[str, Any]]:
    """Run a sweep's scenarios in turn, each in several processes; return each one's sums.

    ``sweep`` takes a cloud, a folder, the scenario, "every N-th", and this process's share of the
    shares. It returns ``runs``, ``wrong``, and figures that are the same in all shares.
    """
    parser = argparse.ArgumentParser(description=(doc or "").split("\n\n", 1)[0])
    parser.add_argument("--every", type=int, default=1, help="try only every N-th point")
    parser.add_argument("--scenario", choices=tuple(scenarios), action="append")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--job", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    chosen = args.scenario or list(scenarios)
    results = {}
    if args.jobs == 1 or args.job is not None:
        with tempfile.TemporaryDirectory() as root, open_cloud(Path(root, "cloud")) as cloud:
            for scenario in chosen:
                share = (args.job or 0, args.jobs)
                results[scenario] = sweep(cloud, Path(root), scenario, args.every, *share)
        if args.job is not None:
            print(json.dumps(results[chosen[0]]))
            raise SystemExit
        return results
    for scenario in chosen:
        options = [f"--scenario={scenario}", f"--every={args.every}"]
        shares = run_shares(module, options, args.jobs)
        runs = sum(share["runs"] for share in shares)
        wrong = [line for share in shares for line in share["wrong"]]
        results[scenario] = {**shares[0], "runs": runs, "wrong": wrong}
    return results


def finish(missed: Sequence[str], **figures: Any) -> NoReturn:
    """Print the benchmark's last line; exit with 1 if a bar was missed."""
    print(json.dumps({"machine": machine(), **figures, "missed": list(missed)}))
    raise SystemExit(1 if missed else 0)


def machine() -> str:
    """Return the processor and the number of cores that this process may use."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return f"{model}, {len(os.sched_getaffinity(0))} cores"
