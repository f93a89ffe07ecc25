"""The place of a rank that torchrun has started, such as in a pod: its own part of the CPUs that it may use.

mpirun pins its ranks as they were planned. torchrun doesn't, and which cores a pod gets is known only there:
with the static CPU manager, kubelet chooses them. So every rank divides what it finds by the rule that also
plans clusters, and as each finds the same, no two take the same core. Runs on Python 3.8.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, MutableMapping, Sequence

from .cores import CoreShare, LocalCore, divide, group_by_node, read_cores, share_cores
from .process import by_torchrun, read_local_place


def take_own_cores(environ: MutableMapping[str, str], threads: int) -> CoreShare | None:
    """Pin the calling thread to this rank's cores and return them; ``None`` if it stays where it is.

    Threads that it starts later inherit them. oneCCL, which mpirun would tell about the ranks, learns the
    same from ``environ``. Raises :class:`BackendError` for variables that are not torchrun's.
    """
    local, workers = read_local_place(environ), environ.get("CCL_WORKER_COUNT", "")
    if "CCL_PROCESS_LAUNCHER" in environ:
        environ.update(CCL_LOCAL_RANK=str(local.rank), CCL_LOCAL_SIZE=str(local.size))
    shares = share_out(
        _find_cores(), local.size, threads, int(workers) if workers.isdecimal() else 0
    )
    if not shares:
        return None
    os.sched_setaffinity(0, shares[local.rank].cpus)
    if pinned := [str(cpu) for share in shares for cpu in share.workers]:
        environ["CCL_WORKER_AFFINITY"] = ",".join(pinned)
    return shares[local.rank]


def explain_unpinned(environ: Mapping[str, str], threads: int) -> str:
    """Return a warning for ranks of a Slurm job that could not take cores; "" on all but a node's first.

    The job has whole nodes, so the cores that were planned for are not those that its nodes have. A pod may
    have been meant to share its node.
    """
    local, cores = read_local_place(environ), len(_find_cores())
    if not by_torchrun(environ) or "SLURM_JOB_ID" not in environ or local.rank or not cores:
        return ""
    return (
        f"warning: {socket.gethostname()}: the ranks are not pinned, and slow: {local.size} x {threads} "
        f"threads do not fit its {cores} cores; write the job again with --cores {cores}"
    )


def _find_cores() -> Sequence[LocalCore]:
    try:
        return read_cores(os.sched_getaffinity(0))
    except OSError:  # a sandbox that hides the processor
        return ()


def share_out(
    cores: Sequence[LocalCore], ranks: int, threads: int, workers: int
) -> tuple[CoreShare, ...]:
    """Return the ranks' cores. Empty if there are too few, or if they may be others' as well. Pure."""
    each = threads + workers
    # Without the static CPU manager, a pod sees the whole node. If it uses less than half of it, another
    # pod like this one may be there, and would take the same cores.
    if not len(cores) // 2 < ranks * each <= len(cores):
        return ()
    groups = divide(cores, ranks)
    if not groups or len(groups[0]) < each:
        in_order = [core for node in group_by_node(cores) for core in node]
        groups = tuple(tuple(in_order[i * each : (i + 1) * each]) for i in range(ranks))
    return share_cores(groups, each, workers)
