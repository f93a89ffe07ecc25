"""A rank's placement on its machine: CPUs, threads, and memory, as planned and as found.

mpirun pins its ranks as planned: the environment variable :data:`VARIABLE` holds the plan of a
node's ranks, a JSON list by local rank. With a bad mask, Intel MPI prints a line and uses its own pinning,
and a library may rebind its threads. So each rank checks with the kernel, and a difference ends the run
before training.

torchrun doesn't pin, and a pod's cores are known only inside it: with the static CPU manager, kubelet
chooses them. So every rank divides the cores it finds by the same rule that plans clusters. All ranks find
the same cores, so no two take the same one. Runs on Python 3.8.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from .cores import CoreShare, LocalCore, divide, group_by_node, read_cores, share_cores
from .errors import WorkerError
from .process import by_torchrun, choose_interface, read_local_place

VARIABLE = "SPR_PLACEMENT"
_NODES = Path("/sys/devices/system/node")
_CPUS = Path("/sys/devices/system/cpu")
_NUMA_MAPS = Path("/proc/self/numa_maps")
_MPOL_PREFERRED = 1  # <linux/mempolicy.h>
_MAX_NODES = 1024
LEAST_SHARE = 0.8
"""The share of the planned threads that a rank keeps at least: see :func:`share_out`."""


@dataclass(frozen=True)
class RankPlacement:
    """Where a rank runs, as planned or as found; in a plan, ``None`` accepts anything.

    ``cpus`` are the rank's CPUs and ``workers`` oneCCL's, both in the kernel's list format; ``threads``
    are OpenMP's; ``memory`` is the kernel's name for the memory policy.
    """

    cpus: str | None
    threads: int
    memory: str | None
    workers: str = ""


def format_cpus(cpus: Iterable[int]) -> str:
    """Return CPUs in the kernel's list format, such as ``0-3,8``."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1][1:] = [cpu]
        else:
            runs.append([cpu])
    return ",".join("-".join(map(str, run)) for run in runs)


def render_plan(places: Iterable[RankPlacement]) -> str:
    """Return the value of :data:`VARIABLE` for a node's ranks."""
    return json.dumps([asdict(place) for place in places], separators=(",", ":"))


def read_plan(environ: Mapping[str, str]) -> RankPlacement | None:
    """Return this rank's plan, or ``None`` without one. Raises :class:`WorkerError`."""
    if VARIABLE not in environ:
        return None
    try:
        return RankPlacement(**json.loads(environ[VARIABLE])[int(environ["MPI_LOCALRANKID"])])
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise WorkerError(
            f"{VARIABLE} has no plan for local rank {environ.get('MPI_LOCALRANKID')}: {error!r}"
        ) from error


def take_place(
    environ: MutableMapping[str, str],
    count_threads: Callable[[], int],
    lower_threads: Callable[[int], None] | None = None,
) -> tuple[RankPlacement | None, RankPlacement]:
    """Set the network interface and the planned memory policy; return the plan and the actual placement.

    mpirun has pinned this rank already; under torchrun, the rank pins itself. It may have to lower the number
    of threads (:func:`share_out`): in ``environ``, and with ``lower_threads`` if OpenMP has already read it.

    The main thread must call it before starting others, which inherit its policy. Raises
    :class:`WorkerError` if they differ.
    """
    choose_interface(environ)
    asked = environ.get("OMP_NUM_THREADS")
    plan = _take_own_cores(environ) if by_torchrun(environ) else read_plan(environ)
    if lower_threads is not None and plan and environ.get("OMP_NUM_THREADS") != asked:
        lower_threads(plan.threads)
    if plan is not None and plan.memory is not None:
        _prefer_memory(plan.memory)
    # First: OpenMP may bind the main thread when it starts, which must be detected.
    threads = count_threads()
    # oneCCL starts and pins its workers with its first collective.
    workers = plan.workers if plan else ""
    cpus = format_cpus(os.sched_getaffinity(0))
    found = RankPlacement(cpus, threads, read_memory_policy(), workers)
    if plan is not None:
        _require_equal(plan, found)
    return plan, found


def leave_computing_cpus() -> None:
    """Move this thread to the other hardware threads of its CPUs' cores, which computing leaves idle.

    A thread that sends and receives would otherwise interrupt one of the computing threads, for which all
    others then wait. It stays where it is if there are none.
    """
    with suppress(OSError, ValueError, AttributeError):  # no topology, none allowed, not Linux
        own, siblings = os.sched_getaffinity(0), 0
        for cpu in own:
            text = (_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings").read_text()
            siblings |= int(text.replace(",", ""), 16)
        os.sched_setaffinity(
            0, {n for n in range(siblings.bit_length()) if siblings >> n & 1} - own
        )


@contextmanager
def beside_computing() -> Iterator[None]:
    """Let the threads that start inside a ``with`` block run where :func:`leave_computing_cpus` says."""
    own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    leave_computing_cpus()
    try:
        yield
    finally:
        if own is not None:
            os.sched_setaffinity(0, own)


@contextmanager
def across(cpus: str) -> Iterator[None]:
    """Let this thread run on a rank's CPUs inside a ``with`` block: Intel's OpenMP binds it to the first one.

    A library may start as many threads as its caller has CPUs. Nothing changes without ``cpus``.
    """
    if not cpus or cpus == format_cpus(own := os.sched_getaffinity(0)):
        yield  # what binds the thread inside is not undone
        return
    ends = ([int(end) for end in part.split("-")] for part in cpus.split(","))
    os.sched_setaffinity(0, {cpu for each in ends for cpu in range(each[0], each[-1] + 1)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def _take_own_cores(environ: MutableMapping[str, str]) -> RankPlacement | None:
    """Pin the calling thread to this rank's cores, and return the plan; ``None`` without threads.

    Threads started later inherit it. oneCCL gets from ``environ`` what mpirun would tell it about the
    ranks. Raises :class:`WorkerError` for invalid torchrun variables.
    """
    asked, workers = environ.get("OMP_NUM_THREADS", ""), environ.get("CCL_WORKER_COUNT", "")
    if not asked.isdecimal():
        return None
    threads, local = int(asked), read_local_place(environ)
    if "CCL_PROCESS_LAUNCHER" in environ:
        environ.update(CCL_LOCAL_RANK=str(local.rank), CCL_LOCAL_SIZE=str(local.size))
    each = int(workers) if workers.isdecimal() else 0
    shares = share_out(_find_cores(), local.size, threads, each)
    if not shares:
        return RankPlacement(None, threads, None)
    own = shares[local.rank]
    os.sched_setaffinity(0, own.cpus)
    if len(own.cpus) != threads:
        if local.rank == 0:
            print(
                f"{socket.gethostname()}: {len(own.cpus)} threads per rank instead of {threads}: "
                "the NUMA nodes differ in size, and each rank stays on one",
                file=sys.stderr,
                flush=True,
            )
        threads = len(own.cpus)
        environ["OMP_NUM_THREADS"] = str(threads)
    if pinned := [str(cpu) for share in shares for cpu in share.workers]:
        environ["CCL_WORKER_AFFINITY"] = ",".join(pinned)
    # Memory is allocated where it is first written: on the NUMA node of these CPUs.
    return RankPlacement(format_cpus(own.cpus), threads, None, format_cpus(own.workers))


def _require_equal(plan: RankPlacement, found: RankPlacement) -> None:
    wrong = []
    if plan.cpus not in (None, found.cpus):
        wrong.append(f"CPUs {plan.cpus} planned, {found.cpus} found")
    if plan.threads != found.threads:
        wrong.append(f"{plan.threads} threads planned, {found.threads} found")
    # With a single NUMA node, the policy is unnecessary, and a container may forbid it.
    if plan.memory not in (None, found.memory) and len(list(_NODES.glob("node[0-9]*"))) > 1:
        wrong.append(f"memory policy {plan.memory} planned, {found.memory} found")
    if wrong:
        raise WorkerError(
            f"this rank does not run where it was planned to: {'; '.join(wrong)}",
            hint="check whether the node sets OMP_, KMP_, I_MPI_, or GOMP_ variables, or limits the "
            "CPUs that processes may use",
        )


def read_memory_policy(path: Path = _NUMA_MAPS) -> str | None:
    """Return the kernel's name of the main thread's policy, such as ``default`` or ``prefer:0``.

    ``None`` on a kernel without NUMA. https://man7.org/linux/man-pages/man7/numa.7.html
    """
    with suppress(OSError):
        lines = path.read_text().splitlines()
        # The stack has no separate policy, so it shows the thread's.
        return next((line.split()[1] for line in lines if " stack" in line), None)
    return None


def _prefer_memory(policy: str) -> None:
    """Prefer one NUMA node's memory and fall back to others when it is full.

    The following comparison with the plan detects a failure.
    """
    node = int(policy.partition(":")[2])
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (_MAX_NODES // bits))()
    mask[node // bits] = 1 << node % bits
    with suppress(OSError, AttributeError):
        # From the package numactl, which every stack installs.
        ctypes.CDLL("libnuma.so.1").set_mempolicy(_MPOL_PREFERRED, mask, _MAX_NODES)


def explain_unpinned(environ: Mapping[str, str], threads: int) -> str:
    """Return a warning for a Slurm job whose ranks got no cores; "" on all but a node's first rank.

    The job has whole nodes, so its nodes' cores differ from the planned ones. (A pod may share its node on
    purpose.)
    """
    local, cores = read_local_place(environ), len(_find_cores())
    if not by_torchrun(environ) or "SLURM_JOB_ID" not in environ or local.rank or not cores:
        return ""
    return (
        f"warning: {socket.gethostname()}: the ranks are not pinned, and slow: {local.size} x {threads} "
        f"threads do not fit its {cores} cores; write the job again with --shape cores={cores}"
    )


def _find_cores() -> Sequence[LocalCore]:
    try:
        return read_cores(os.sched_getaffinity(0))
    except OSError:  # a sandbox that hides the processor
        return ()


def share_out(
    cores: Sequence[LocalCore], ranks: int, threads: int, workers: int
) -> tuple[CoreShare, ...]:
    """Return the ranks' cores; empty if there are too few, or if others may also use them. Pure.

    Where NUMA nodes differ in size, ranks get fewer than ``threads``, down to :data:`LEAST_SHARE` of them, if
    that keeps each on its own nodes: its threads would wait for one on another node in every operation.
    """
    each = threads + workers
    # Without the static CPU manager, a pod sees the whole node. If it uses less than half of it, another
    # pod like this one may be there, and would take the same cores.
    if not len(cores) // 2 < ranks * each <= len(cores):
        return ()
    groups = divide(cores, ranks)
    if not groups or len(groups[0]) < each:
        groups = _divide_unevenly(cores, ranks)
        least = min(map(len, groups), default=0)
        if workers + LEAST_SHARE * threads <= least:
            each = min(each, least)
        else:
            in_order = [core for node in group_by_node(cores) for core in node]
            groups = tuple(tuple(in_order[i * each : (i + 1) * each]) for i in range(ranks))
    return share_cores(groups, each, workers)


def _divide_unevenly(cores: Sequence[LocalCore], ranks: int) -> tuple[tuple[LocalCore, ...], ...]:
    """Like :func:`divide`, for NUMA nodes of different sizes: kubelet fills one before it uses the next."""
    nodes = group_by_node(cores)
    together, parts = max(1, len(nodes) // ranks), max(1, ranks // len(nodes))
    if together * ranks != parts * len(nodes):
        return ()
    wholes = [sum(nodes[n : n + together], ()) for n in range(0, len(nodes), together)]
    sizes = [len(whole) // parts for whole in wholes]
    return tuple(
        whole[n * size : (n + 1) * size]
        for whole, size in zip(wholes, sizes)  # noqa: B905 - Python 3.8
        for n in range(parts)
    )
