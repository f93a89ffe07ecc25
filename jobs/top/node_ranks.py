"""The ranks on a node, and their CPUs. Runs on the nodes: see :mod:`jobs.top.sampler`.

A rank is a process of this user with its number in its environment: mpirun and srun set PMI_RANK, torchrun
RANK. Its job is the folder below the jobs' folder in which it runs, else Slurm's name of it. Metrics files
written lately count as ranks, too.
"""

from __future__ import annotations

import glob
import heapq
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from jobs.top.procfs import parse_cpus, read, read_environ

_FRESH_S = 30.0
_NEWEST_JOBS = 3
# As :mod:`jobs.worker.runtime.process` reads them, which does not come along. Other programs set RANK, too,
# so it alone is not enough; torchrun itself has neither.
_MPIRUN = ("PMI_RANK", "MPI_LOCALRANKID")
_TORCHRUN = ("RANK", "LOCAL_RANK")
_METRICS = re.compile(r"rank-(\d+)\.jsonl")


class RankKey(NamedTuple):
    """A rank of a job."""

    job: str
    rank: int


class RankCpus(NamedTuple):
    """The CPUs that a rank computes on, and those of its oneCCL workers, in the kernel's list format."""

    cpus: str
    workers: str = ""


class CpuGroup(NamedTuple):
    """CPUs with the same use: that of some ranks, of oneCCL, or none of these."""

    name: str
    ranks: list[int]
    cpus: set[int]
    listed: str = ""


def find_ranks(proc: str, jobs: str, uid: int) -> dict[RankKey, RankCpus]:
    """Return the ranks whose processes run on this node."""
    found: dict[RankKey, RankCpus] = {}
    for entry in os.scandir(proc):
        if not entry.name.isdigit():
            continue
        with suppress(OSError, ValueError):
            if entry.stat().st_uid != uid:
                continue
            environ = read_environ(entry.path)
            name = find_names(environ)[0]
            if name in environ:
                key = RankKey(find_job(entry.path, environ, jobs), int(environ[name]))
                # A rank's children have its environment, too.
                if key.job and key not in found:
                    found[key] = find_cpus(entry.path, environ)
    return found


def find_names(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the variables with a rank's number among all, and among those of its node."""
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
    """Return a rank's CPUs: as planned, which the rank itself has checked, else as the kernel says."""
    with suppress(ValueError, KeyError, IndexError, TypeError):
        place = json.loads(environ["SPR_PLACEMENT"])[int(environ[find_names(environ)[1]])]
        if place["cpus"]:
            return RankCpus(place["cpus"], place["workers"])
    status = read(process + "/status")
    allowed = re.search(r"^Cpus_allowed_list:\s*(\S+)", status, re.MULTILINE)
    return RankCpus(allowed.group(1) if allowed else "")


def group_cpus(ranks: Mapping[RankKey, RankCpus], cpus: set[int]) -> list[CpuGroup]:
    """Divide a node's CPUs: ranks with the same CPUs are one group, and what is left is the last."""
    members: dict[str, list[int]] = {}
    workers: dict[str, None] = {}
    for key in sorted(ranks):
        members.setdefault(ranks[key].cpus, []).append(key.rank)
        workers[ranks[key].workers] = None
    listed = ",".join(filter(None, workers))
    groups = [
        CpuGroup("rank " + ",".join(map(str, some)), some, parse_cpus(text) & cpus, text)
        for text, some in members.items()
    ]
    groups.append(CpuGroup("oneCCL", [], parse_cpus(listed) & cpus, listed))
    taken = set().union(*(group.cpus for group in groups))
    groups.append(CpuGroup("rest", [], cpus - taken))
    return [group for group in groups if group.cpus]


def find_metrics(jobs: str, now: float) -> dict[RankKey, str]:
    """Return the metrics files of the newest jobs that were written lately."""
    folders = []
    for folder in glob.glob(glob.escape(jobs) + "/*/output/metrics"):  # noqa: PTH207
        with suppress(OSError):
            folders.append((os.stat(folder).st_mtime, folder))  # noqa: PTH116
    found = {}
    for _, folder in heapq.nlargest(_NEWEST_JOBS, folders):
        with suppress(OSError):
            for entry in os.scandir(folder):
                match = _METRICS.fullmatch(entry.name)
                if match and now - entry.stat().st_mtime < _FRESH_S:
                    found[RankKey(folder.split("/")[-3], int(match.group(1)))] = entry.path
    return found
