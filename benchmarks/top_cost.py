"""Cost of `spr-cluster top`: on a node, on the head of 64 nodes, and on the laptop that shows them.

python -m benchmarks.top_cost [--rounds 5] [--seconds 10]

Each is a real process, refreshing every second, and the figure is the CPU time that the kernel counts for it,
after its start, in percent of one core. The node's sampler watches two ranks that take 20 steps a second.
The head's relay reads 64 samplers that print recorded lines; its SSH clients are not counted. The laptop
plays 64 nodes on a terminal of 200 x 50.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.common import ROOT, finish
from jobs.top.collect import send_relay
from provision.on_node import sampler
from provision.run_on_nodes import send
from tests.jobs.top.samples import (
    NodeProcess,
    make_node,
    make_rank,
    make_snapshot,
    running_rank,
    write_metrics,
)

NODES = 64
LIMITS = {"node": 1.0, "head": 1.0, "laptop": 5.0}
_WARM_UP_S = 3.0


def main() -> None:
    """Measure the three in turn; print each one's median."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=10, help="of each measurement")
    args = parser.parse_args()
    shares: dict[str, list[float]] = {name: [] for name in LIMITS}
    begin = {"node": sample_node, "head": relay_nodes, "laptop": show_nodes}
    with tempfile.TemporaryDirectory() as folder:
        write_recording(Path(folder))
        for _ in range(args.rounds):
            for name, start in begin.items():
                with start(Path(folder)) as pid:
                    shares[name].append(measure(pid, args.seconds))
    medians = {name: round(statistics.median(values), 3) for name, values in shares.items()}
    missed = [f"{LIMITS[n]:g} % on the {n}" for n, value in medians.items() if value >= LIMITS[n]]
    finish(
        missed,
        benchmark="top_cost",
        percent_of_a_core=medians,
        highest={name: round(max(values), 3) for name, values in shares.items()},
        limits=LIMITS,
        nodes=NODES,
        **vars(args),
    )


def measure(pid: int, seconds: int) -> float:
    """Return a process's CPU time in percent of one core, once it has started."""
    time.sleep(_WARM_UP_S)
    before, start = cpu_seconds(pid), time.monotonic()
    time.sleep(seconds)
    return 100 * (cpu_seconds(pid) - before) / (time.monotonic() - start)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads, by the scheduler: stat's ticks are too coarse."""
    paths = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(path.read_text().split()[0]) for path in paths) / 1e9


def write_recording(folder: Path) -> None:
    """Write a recording of changing figures, and one node's lines as its sampler would print them."""
    chance = random.Random(1)

    def node(index: int, second: int) -> dict[str, object]:
        ranks = [
            make_rank(2 * index + i, step=100 + second, own_seconds=chance.uniform(0.4, 0.5))
            for i in (0, 1)
        ]
        traffic = {name: chance.randrange(1 << 30) for name in ("received", "sent")}
        return make_node(index, ranks=ranks, busy=chance.uniform(0, 100), **traffic)

    seconds = [[node(index, second) for index in range(NODES)] for second in range(60)]
    lines = [make_snapshot(nodes).as_json() for nodes in seconds]
    (folder / "record.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "ssh").write_text(f"#!/bin/sh\nwhile sleep 1; do cat {folder}/line || exit; done\n")
    (folder / "ssh").chmod(0o755)
    (folder / "line").write_text(json.dumps({**seconds[0][0], "name": "x"}) + "\n")


@contextmanager
def sample_node(folder: Path) -> Iterator[int]:
    """Run the real sampler beside a job whose two ranks write their metrics."""
    ended = threading.Event()
    line = write_metrics(folder, 0, 1).read_text()

    def train() -> None:
        paths = [write_metrics(folder, rank, 2000) for rank in (0, 1)]
        while not ended.wait(5):  # as seldom as jobs/worker/runtime/output.py
            for path in paths:
                with path.open("a") as file:
                    file.write(100 * line)

    writer = threading.Thread(target=train)
    writer.start()
    question = json.dumps({"interval_s": 1.0, "jobs": str(folder)})
    text = send(sampler, lines=[question]).stdin
    try:
        with (
            running_rank(folder, 0),
            running_rank(folder, 1),
            reading(NodeProcess.start(text)) as pid,
        ):
            yield pid
    finally:
        ended.set()
        writer.join()


@contextmanager
def relay_nodes(folder: Path) -> Iterator[int]:
    """Run the real relay with workers that play recorded lines."""
    names = [f"node{index}" for index in range(NODES)]
    with reading(NodeProcess.start(send_relay(names, 1.0).stdin, path=folder)) as pid:
        yield pid


@contextmanager
def reading(program: NodeProcess) -> Iterator[int]:
    """Read what a program prints, and send its beats, for the duration of a ``with`` block."""

    def read() -> None:
        for _ in program:
            program.send("\n")

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with program:
        yield program.process.pid
        program.process.kill()
        reader.join()


@contextmanager
def show_nodes(folder: Path) -> Iterator[int]:
    """Show the recording on a terminal."""
    terminal, end = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
    argv = [sys.executable, "-m", "jobs", "top", "--replay", str(folder / "record.jsonl")]
    environ = {**os.environ, "TERM": "xterm-256color"}
    process = subprocess.Popen(argv, stdin=end, stdout=end, stderr=end, cwd=ROOT, env=environ)
    os.close(end)

    def read() -> None:
        while process.poll() is None:
            try:
                os.read(terminal, 1 << 16)
            except OSError:  # its other end is closed
                return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()
        reader.join()
        os.close(terminal)


if __name__ == "__main__":
    main()
