"""Sampler: runs on every node while a user watches, and prints one line of JSON per interval.

The sampler writes nothing. It ends when its standard input ends or was silent for SILENCE_S, so it never
outlives the viewer. It reads only the end of each rank's metrics file (see jobs/worker/runtime/output.py), so
the cost depends neither on the file's length nor on the speed of the steps.
"""

from __future__ import annotations

import contextlib
import glob
import json
import math
import os
import select
import signal
import sys
import time
from contextlib import suppress
from typing import Any, NamedTuple

from provision.on_node.proc import (
    RankCpus,
    RankKey,
    busy_percent,
    find_ranks,
    group_cpus,
    parse_memory,
    parse_network,
    parse_times,
    read,
)

SILENCE_S = 30
_SEARCH_S = 5.0
"""Interval between searches for ranks, which start and end with jobs; a search reads all of /proc."""
_NICE = 10
"""The ranks matter more than their metrics."""
_TAIL_BYTES = 16384
"""The maximum size parsed at a time."""
_WINDOW_S = 20.0
"""Training time over which a rank's metrics are averaged."""


class TailStep(NamedTuple):
    """One step: ``own`` of its ``whole`` seconds were not spent waiting for other ranks."""

    step: int
    time: float
    loss: float
    samples: float
    whole: float
    own: float


def parse_step(line: bytes) -> TailStep:
    """Parse a line of a metrics file. Raises what a damaged line raises."""
    row = json.loads(line)
    seconds = row["seconds"]
    whole = float(sum(seconds.values()))
    own = whole - seconds.get("communication", 0.0)
    found = TailStep(
        int(row["step"]), float(row["time"]), float(row["loss"]), float(row["samples"]), whole, own
    )
    if not all(map(math.isfinite, found._replace(loss=0.0))):
        raise ValueError(line)
    return found


def read_tail(path: str, now: float) -> dict[str, Any]:
    """Return a metrics file's newest step and averages over the last seconds; {} before the first step."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            found = os.fstat(file.fileno())
            begin = max(0, found.st_size - _TAIL_BYTES)
            file.seek(begin)
            lines = file.read(_TAIL_BYTES).split(b"\n")
    except OSError:
        return {}
    steps = []
    for line in lines[begin > 0 : -1]:  # the first may be cut off, and the last one is not whole
        with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            steps.append(parse_step(line))
    if not steps:
        return {}
    last = steps[-1]
    recent = [each for each in steps if each.time >= last.time - _WINDOW_S]
    steps = recent if len(recent) > 1 else steps[-2:]
    age_s = round(max(0.0, now - found.st_mtime), 1)
    loss = last.loss if math.isfinite(last.loss) else None
    figures: dict[str, Any] = {"step": last.step, "age_s": age_s, "loss": loss}
    passed = last.time - steps[0].time
    if passed > 0:
        samples = sum(each.samples for each in steps[1:])
        figures["samples_per_second"] = round(samples / passed, 3)
    whole, own = sum(each.whole for each in steps), sum(each.own for each in steps)
    if whole > 0:
        figures["communication"] = round(1 - own / whole, 4)
        figures["own_seconds"] = round(own / len(steps), 6)
    return figures


class Sampler:
    """One node's metrics since its last sample."""

    def __init__(self, jobs: str, proc: str = "/proc", devices: str = "/sys/class/net") -> None:
        self._jobs, self._proc = jobs, proc
        # Only physical devices: the traffic of bridges would count twice.
        self._devices = {path.split("/")[-2] for path in glob.glob(devices + "/*/device")}  # noqa: PTH207
        self._ranks: dict[RankKey, RankCpus] = {}
        self._searched = float("-inf")
        self._times = self._read_times()
        self._traffic = self._read_traffic()
        self._looked = time.monotonic()

    def _read_times(self) -> dict[int, tuple[int, int]]:
        return parse_times(read(self._proc + "/stat"))

    def _read_traffic(self) -> tuple[int, int]:
        return parse_network(read(self._proc + "/net/dev"), self._devices)

    def look(self) -> dict[str, Any]:
        """Return the metrics since the last sample, or since the start."""
        tick = time.monotonic()
        if tick - self._searched >= _SEARCH_S:
            self._ranks = find_ranks(self._proc, self._jobs, os.getuid())
            self._searched = tick
        passed, self._looked = max(tick - self._looked, 1e-3), tick
        return {
            **self._look_at_cpus(),
            **parse_memory(read(self._proc + "/meminfo")),
            **self._look_at_traffic(passed),
            # Files alone prove nothing: the end of a job brings those of other nodes to the head.
            "ranks": [{**key._asdict(), **self._read_metrics(key)} for key in sorted(self._ranks)],
        }

    def _read_metrics(self, key: RankKey) -> dict[str, Any]:
        path = f"{self._jobs}/{key.job}/output.state/metrics/rank-{key.rank}.jsonl"
        return read_tail(path, time.time())

    def _look_at_cpus(self) -> dict[str, Any]:
        before, self._times = self._times, self._read_times()
        groups = [
            {
                "name": group.name,
                "ranks": group.ranks,
                "job": group.job,
                "cpus": group.listed,
                "count": len(group.cpus),
                "busy": busy_percent(before, self._times, group.cpus),
            }
            for group in group_cpus(self._ranks, set(self._times))
        ]
        return {"busy": busy_percent(before, self._times, self._times), "groups": groups}

    def _look_at_traffic(self, passed: float) -> dict[str, int]:
        before, self._traffic = self._traffic, self._read_traffic()
        received, sent = (
            max(0, round((self._traffic[way] - before[way]) / passed)) for way in (0, 1)
        )
        return {"received": received, "sent": sent}


def main() -> None:
    """Print samples until standard input ends. Its first line is JSON: ``interval_s`` and ``jobs``."""
    question = json.loads(sys.stdin.readline())
    interval = float(question["interval_s"])
    os.nice(_NICE)
    # Linux may divide CPU time between sessions first.
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as file:  # noqa: PTH123
        file.write(str(_NICE))
    sampler = Sampler(os.path.abspath(os.path.expanduser(question["jobs"])))  # noqa: PTH100, PTH111
    due = time.monotonic() + min(1.0, interval)
    set_end(interval)
    while True:
        if select.select([0], [], [], max(0.0, due - time.monotonic()))[0]:
            if not os.read(0, 4096):
                return
            set_end(interval)
        if time.monotonic() >= due:
            try:
                print(json.dumps(sampler.look()), flush=True)
            except BrokenPipeError:
                os._exit(0)
            # After the machine was suspended, do not print one line per missed interval.
            due = max(due + interval, time.monotonic() + interval / 2)


def set_end(interval: float) -> None:
    """End this process after SILENCE_S and some intervals, unless called again before.

    This works wherever the process is blocked, even in a write that nobody reads.
    """
    signal.setitimer(signal.ITIMER_REAL, SILENCE_S + 3 * interval)
