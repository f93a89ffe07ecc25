"""Sampler: runs on every node while somebody looks, and prints one line of JSON per interval.

It and the modules that it imports use the standard library alone, and Python 3.8 or newer. They arrive on
standard input, and leave no file. The sampler writes nothing. It ends when its standard input ends, or was
silent for SILENCE_S, so it never outlives the one who looks.
"""

from __future__ import annotations

import glob
import json
import os
import select
import signal
import sys
import time
from typing import Any

from jobs.top.metrics_tail import MetricsTail
from jobs.top.node_ranks import RankCpus, RankKey, find_metrics, find_ranks, group_cpus
from jobs.top.procfs import busy_percent, parse_memory, parse_network, parse_times, read

SILENCE_S = 30
_SEARCH_S = 5.0
"""Between two searches for ranks: they come and go with jobs, and a search reads all of /proc."""
_NICE = 10
"""The ranks matter more than their figures."""


class Sampler:
    """One node's figures since its last look."""

    def __init__(self, jobs: str, proc: str = "/proc", devices: str = "/sys/class/net") -> None:
        self._jobs, self._proc = jobs, proc
        # What the kernel has a device for: not bridges, whose traffic would count twice.
        self._devices = {path.split("/")[-2] for path in glob.glob(devices + "/*/device")}  # noqa: PTH207
        self._ranks: dict[RankKey, RankCpus] = {}
        self._tails: dict[RankKey, MetricsTail] = {}
        self._searched = float("-inf")
        self._times = self._read_times()
        self._traffic = self._read_traffic()
        self._looked = time.monotonic()

    def _read_times(self) -> dict[int, tuple[int, int]]:
        return parse_times(read(self._proc + "/stat"))

    def _read_traffic(self) -> tuple[int, int]:
        return parse_network(read(self._proc + "/net/dev"), self._devices)

    def look(self) -> dict[str, Any]:
        """Return the figures of the time since the last look, or since the beginning."""
        tick, now = time.monotonic(), time.time()
        if tick - self._searched >= _SEARCH_S:
            self._search(now)
            self._searched = tick
        for tail in self._tails.values():
            tail.look(now)
        passed, self._looked = max(tick - self._looked, 1e-3), tick
        return {
            **self._look_at_cpus(),
            **parse_memory(read(self._proc + "/meminfo")),
            **self._look_at_traffic(passed),
            "ranks": [
                {"job": key.job, "rank": key.rank, **self._tails[key].figures()}
                for key in sorted(self._tails)
            ],
        }

    def _search(self, now: float) -> None:
        self._ranks = find_ranks(self._proc, self._jobs, os.getuid())
        paths = find_metrics(self._jobs, now)
        for key in self._ranks:
            paths[key] = f"{self._jobs}/{key.job}/output/metrics/rank-{key.rank}.jsonl"
        known = self._tails
        self._tails = {key: known.get(key) or MetricsTail(path) for key, path in paths.items()}

    def _look_at_cpus(self) -> dict[str, Any]:
        before, self._times = self._times, self._read_times()
        groups = [
            {
                "name": group.name,
                "ranks": group.ranks,
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
    """Print figures until standard input ends. Its next line is JSON: ``interval_s``, and ``jobs``."""
    question = json.loads(sys.stdin.readline())
    interval = float(question["interval_s"])
    os.nice(_NICE)
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
            # After a pause of the machine, not one line for each second of it.
            due = max(due + interval, time.monotonic() + interval / 2)


def set_end(interval: float) -> None:
    """End this process after SILENCE_S, and some intervals, unless this is called again until then.

    It ends wherever it waits, also in a write that is not read.
    """
    signal.setitimer(signal.ITIMER_REAL, SILENCE_S + 3 * interval)
