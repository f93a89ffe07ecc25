"""Where a rank really runs, against what was planned for it: CPUs, threads, memory.

The plan of all ranks of a node comes in the environment variable :data:`VARIABLE`, as a JSON list by
local rank. A bad mask makes Intel MPI print a line and go on with its own pinning, and a library may
bind its threads anew: so each rank asks the kernel, and a difference ends the run before it trains.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from .errors import PlacementError

VARIABLE = "SPR_PLACEMENT"
_NODES = Path("/sys/devices/system/node")
_NUMA_MAPS = Path("/proc/self/numa_maps")
_MPOL_PREFERRED = 1  # <linux/mempolicy.h>
_MAX_NODES = 1024


@dataclass(frozen=True)
class RankPlacement:
    """Where a rank runs, as planned or as found; in a plan ``None`` is whatever it may be.

    ``cpus`` are those it may run on and ``workers`` those of oneCCL, both in the kernel's list
    format; ``threads`` are OpenMP's, ``memory`` is the kernel's name of the memory policy.
    """

    cpus: str | None
    threads: int
    memory: str | None
    workers: str = ""


def format_cpus(cpus: Iterable[int]) -> str:
    """CPUs in the kernel's list format, such as ``0-3,8``."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1][1:] = [cpu]
        else:
            runs.append([cpu])
    return ",".join("-".join(map(str, run)) for run in runs)


def render_plan(places: Iterable[RankPlacement]) -> str:
    """A node's ranks as :data:`VARIABLE` holds them."""
    return json.dumps([asdict(place) for place in places], separators=(",", ":"))


def read_plan(environ: Mapping[str, str]) -> RankPlacement | None:
    """This rank's plan; ``None`` where nothing was planned. Raises :class:`PlacementError`."""
    if VARIABLE not in environ:
        return None
    try:
        return RankPlacement(**json.loads(environ[VARIABLE])[int(environ["MPI_LOCALRANKID"])])
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise PlacementError(
            f"{VARIABLE} has no plan for local rank {environ.get('MPI_LOCALRANKID')}: {error!r}"
        ) from error


def take_place(
    environ: Mapping[str, str], count_threads: Callable[[], int]
) -> tuple[RankPlacement | None, RankPlacement]:
    """Ask for the planned memory, and return plan and what is. Raises :class:`PlacementError`.

    To be called by the main thread before any other is there: those to come inherit its policy.
    """
    plan = read_plan(environ)
    if plan is not None and plan.memory is not None:
        _prefer_memory(plan.memory)
    found = _look_around(plan, count_threads)
    if plan is not None:
        _require_equal(plan, found)
    return plan, found


def _look_around(plan: RankPlacement | None, count_threads: Callable[[], int]) -> RankPlacement:
    # First: OpenMP may bind the main thread as soon as torch loads it, and that has to show.
    threads = count_threads()
    return RankPlacement(
        cpus=format_cpus(os.sched_getaffinity(0)),
        threads=threads,
        memory=read_memory_policy(),
        # oneCCL starts them with its first collective, and pins them itself.
        workers=plan.workers if plan else "",
    )


def _require_equal(plan: RankPlacement, found: RankPlacement) -> None:
    wrong = []
    if plan.cpus not in (None, found.cpus):
        wrong.append(f"CPUs {plan.cpus} planned, {found.cpus} found")
    if plan.threads != found.threads:
        wrong.append(f"{plan.threads} threads planned, {found.threads} found")
    if plan.memory not in (None, found.memory) and not _only_one_numa_node():
        wrong.append(f"memory policy {plan.memory} planned, {found.memory} found")
    if wrong:
        raise PlacementError(
            f"this rank does not run where it should: {'; '.join(wrong)}",
            hint="does anything on the node set OMP_, KMP_, I_MPI_ or GOMP_ variables, or change "
            "which CPUs it may use?",
        )


def read_memory_policy(path: Path = _NUMA_MAPS) -> str | None:
    """The kernel's name of the main thread's policy, such as ``default`` or ``prefer:0``.

    ``None`` where the kernel does not tell. https://man7.org/linux/man-pages/man7/numa.7.html
    """
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    # The stack has no policy of its own, so it shows the thread's.
    return next((line.split()[1] for line in lines if " stack" in line), None)


def _prefer_memory(policy: str) -> None:
    """Ask for a NUMA node's memory first; others serve when it is full, instead of the OOM killer.

    A refusal is not an error here: the comparison with what the kernel says of it follows.
    """
    node = int(policy.partition(":")[2])
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (_MAX_NODES // bits))()
    mask[node // bits] = 1 << node % bits
    try:
        # Of the package numactl, which every stack installs.
        ctypes.CDLL("libnuma.so.1").set_mempolicy(_MPOL_PREFERRED, mask, _MAX_NODES)
    except (OSError, AttributeError):
        return


def _only_one_numa_node() -> bool:
    """There is no choice of memory, so that it does not matter what a container forbids."""
    return len(list(_NODES.glob("node[0-9]*"))) <= 1
