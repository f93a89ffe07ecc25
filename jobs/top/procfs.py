"""What /proc says of a node: CPU time, memory, traffic. Runs on the nodes: see :mod:`jobs.top.sampler`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping


def read(path: str) -> str:
    """Return a file's text; "" if it can't be read, such as that of a process that has ended."""
    try:
        with open(path, errors="replace") as file:  # noqa: PTH123 - Path takes ten times as long
            return file.read()
    except OSError:
        return ""


def parse_cpus(text: str) -> set[int]:
    """Parse the kernel's list format, such as ``0-3,8``."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        low, _, high = part.partition("-")
        found.update(range(int(low), int(high or low) + 1))
    return found


def parse_times(text: str) -> dict[int, tuple[int, int]]:
    """Return each CPU's busy and total ticks since boot, from ``/proc/stat``."""
    times = {}
    for line in text.splitlines():
        if not line.startswith("cpu"):
            break
        name, *fields = line.split()
        if name != "cpu":
            # user nice system idle iowait irq softirq steal; guest time is part of user time.
            ticks = [int(field) for field in fields[:8]]
            total = sum(ticks)
            times[int(name[3:])] = (total - ticks[3] - ticks[4], total)
    return times


def busy_percent(
    before: Mapping[int, tuple[int, int]],
    after: Mapping[int, tuple[int, int]],
    cpus: Iterable[int],
) -> float:
    """Return how busy some CPUs were between two looks, in percent of all their time."""
    busy = total = 0
    for cpu in cpus:
        if cpu in before and cpu in after:
            busy += after[cpu][0] - before[cpu][0]
            total += after[cpu][1] - before[cpu][1]
    return round(100 * min(1.0, max(0.0, busy / total)), 1) if total > 0 else 0.0


def parse_memory(text: str) -> dict[str, int]:
    """Return the bytes of memory: all, and what a program could still get."""
    pairs = re.findall(r"^(MemTotal|MemAvailable):\s+(\d+)", text, re.MULTILINE)
    known = {name: 1024 * int(number) for name, number in pairs}
    return {"memory": known.get("MemTotal", 0), "available": known.get("MemAvailable", 0)}


def parse_network(text: str, devices: set[str]) -> tuple[int, int]:
    """Return the bytes received and sent by these devices; without any, by all but loopback."""
    received = sent = 0
    for line in text.splitlines()[2:]:
        name, _, counters = line.partition(":")
        if name.strip() in devices or (not devices and name.strip() != "lo"):
            fields = counters.split()
            received, sent = received + int(fields[0]), sent + int(fields[8])
    return received, sent


def read_environ(process: str) -> dict[str, str]:
    """Return the environment with which a process began; ``process`` is its folder in /proc."""
    pairs = (pair.partition("=") for pair in read(process + "/environ").split("\0"))
    return {name: value for name, _, value in pairs}
