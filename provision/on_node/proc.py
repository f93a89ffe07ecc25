"""Read /proc on a node: CPU time, memory, traffic, and the ranks with their CPUs.

A rank is a process of this user with its number in its environment: mpirun and srun set PMI_RANK, torchrun
RANK. Its job is its working folder below the jobs' folder, else Slurm's name.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

# As in :mod:`jobs.worker.runtime.process`, which is not sent along. Other programs also set RANK, so RANK
# alone is not enough; torchrun itself has neither.
_MPIRUN = ("PMI_RANK", "MPI_LOCALRANKID")
_TORCHRUN = ("RANK", "LOCAL_RANK")
# Set for each trial of a study and each element of an array, which are rank 0 of runs of their own.
_IN_POOL = "SPR_IN_POOL"


def read(path: str) -> str:
    """Return a file's text; "" if it can't be read, for example after its process has ended."""
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
    before: Mapping[int, tuple[int, int]], after: Mapping[int, tuple[int, int]], cpus: Iterable[int]
) -> float:
    """Return how busy CPUs were between two samples, in percent of their total time."""
    busy = total = 0
    for cpu in cpus:
        if cpu in before and cpu in after:
            busy += after[cpu][0] - before[cpu][0]
            total += after[cpu][1] - before[cpu][1]
    return round(100 * min(1.0, max(0.0, busy / total)), 1) if total > 0 else 0.0


def parse_memory(text: str) -> dict[str, int]:
    """Return the bytes of total and available memory."""
    pairs = re.findall(r"^(MemTotal|MemAvailable):\s+(\d+)", text, re.MULTILINE)
    known = {name: 1024 * int(number) for name, number in pairs}
    return {"memory": known.get("MemTotal", 0), "available": known.get("MemAvailable", 0)}


def parse_network(text: str, devices: set[str]) -> tuple[int, int]:
    """Return the bytes received and sent by these devices, by default all except loopback."""
    received = sent = 0
    for line in text.splitlines()[2:]:
        name, _, counters = line.partition(":")
        if name.strip() in devices or (not devices and name.strip() != "lo"):
            fields = counters.split()
            received, sent = received + int(fields[0]), sent + int(fields[8])
    return received, sent


class RankKey(NamedTuple):
    """A rank of a job."""

    job: str
    rank: int


class RankCpus(NamedTuple):
    """The CPUs that a rank computes on, and those of its oneCCL workers, in the kernel's list format."""

    cpus: str
    workers: str = ""


class CpuGroup(NamedTuple):
    """CPUs with the same use: by certain ranks, by oneCCL, or by neither."""

    name: str
    ranks: list[int]
    cpus: set[int]
    listed: str = ""
    job: str = ""


def find_ranks(proc: str, jobs: str, uid: int) -> dict[RankKey, RankCpus]:
    """Return the ranks whose processes run on this node."""
    found: dict[RankKey, RankCpus] = {}
    for entry in os.scandir(proc):
        if not entry.name.isdigit():
            continue
        with suppress(OSError, ValueError):
            if entry.stat().st_uid != uid:
                continue
            pairs = (pair.partition("=") for pair in read(entry.path + "/environ").split("\0"))
            environ = {name: value for name, _, value in pairs}
            name = find_names(environ)[0]
            if name in environ and _IN_POOL not in environ:
                key = RankKey(find_job(entry.path, environ, jobs), int(environ[name]))
                # A rank's children share its environment.
                if key.job and key not in found:
                    found[key] = find_cpus(entry.path, environ)
    return found


def find_names(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the variables with a rank's global and local number."""
    by_torchrun = _MPIRUN[0] not in environ and _TORCHRUN[1] in environ
    return _TORCHRUN if by_torchrun else _MPIRUN


def find_job(process: str, environ: Mapping[str, str], jobs: str) -> str:
    """Return the ID of a process's job; "" if it has none. Raises :class:`OSError`."""
    folder = os.readlink(process + "/cwd")  # noqa: PTH115
    if folder.startswith(jobs + "/"):
        return folder[len(jobs) + 1 :].split("/")[0]
    # A program may have gone to another folder. Our jobs have Slurm's names.
    return environ.get("SLURM_JOB_NAME", "").replace("/", "_")


def find_cpus(process: str, environ: Mapping[str, str]) -> RankCpus:
    """Return a rank's CPUs: from its plan, which the rank has verified, else from the kernel."""
    with suppress(ValueError, KeyError, IndexError, TypeError):
        place = json.loads(environ["SPR_PLACEMENT"])[int(environ[find_names(environ)[1]])]
        if place["cpus"]:
            return RankCpus(place["cpus"], place["workers"])
    status = read(process + "/status")
    allowed = re.search(r"^Cpus_allowed_list:\s*(\S+)", status, re.MULTILINE)
    return RankCpus(allowed.group(1) if allowed else "")


def group_cpus(ranks: Mapping[RankKey, RankCpus], cpus: set[int]) -> list[CpuGroup]:
    """Divide a node's CPUs into groups: ranks with the same CPUs are one, the remaining CPUs the last."""
    members: dict[tuple[str, str], list[int]] = {}
    workers: dict[str, None] = {}
    for key in sorted(ranks):
        members.setdefault((key.job, ranks[key].cpus), []).append(key.rank)
        workers[ranks[key].workers] = None
    listed = ",".join(filter(None, workers))
    groups = [
        CpuGroup("rank " + ",".join(map(str, some)), some, parse_cpus(text) & cpus, text, job)
        for (job, text), some in members.items()
    ]
    groups.append(CpuGroup("oneCCL", [], parse_cpus(listed) & cpus, listed))
    taken = set().union(*(group.cpus for group in groups))
    groups.append(CpuGroup("rest", [], cpus - taken))
    return [group for group in groups if group.cpus]
