"""The cores of a node's ranks, as mpirun, oneCCL, and the ranks themselves take them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ..runtime.cores import CoreShare, cpu_mask
from ..runtime.pinning import VARIABLE, RankPlacement, format_cpus, render_plan


def fit_pinning(shares: Sequence[CoreShare], cpus: Sequence[int]) -> tuple[CoreShare, ...]:
    """Return the ranks' cores on a node whose processes may use ``cpus``: the planned ones, if they fit.

    Otherwise, as after `repair`, each planned CPU stands for one of the node's, in their order. With too
    few of them, the plan stays as it is, and a rank reports the difference.
    """
    planned = sorted({cpu for share in shares for cpu in (*share.cpus, *share.workers)})
    if set(planned) <= set(cpus) or len(planned) > len(cpus):
        return tuple(shares)
    to = dict(zip(planned, sorted(cpus)))  # noqa: B905 - Python 3.8; the lengths may differ
    # The NUMA node may be another one, too.
    return tuple(
        CoreShare(tuple(to[cpu] for cpu in each.cpus), tuple(to[cpu] for cpu in each.workers), None)
        for each in shares
    )


def render_pinning(
    shares: Sequence[CoreShare], ranks: int, threads: int, *, ccl: bool
) -> dict[str, str]:
    """Return the environment of one node's ranks: their CPUs, and the plan that each rank checks.

    Without shares, nothing is pinned.
    """
    env = {}
    if shares:
        # Without 0x, Intel MPI prints an IPL2 error and chooses the pinning itself [tried].
        env["I_MPI_PIN_DOMAIN"] = f"[{','.join(hex(cpu_mask(share.cpus)) for share in shares)}]"
    unpinned = RankPlacement(cpus=None, threads=threads, memory=None)
    env[VARIABLE] = render_plan([_place(each, threads) for each in shares] or [unpinned] * ranks)
    if ccl:
        # One entry per worker of the node. "auto" would take the last CPUs of each domain:
        # https://oneapi-src.github.io/oneCCL/general-configuration/operation-execution.html
        workers = ",".join(str(cpu) for share in shares for cpu in share.workers)
        env["CCL_WORKER_AFFINITY"] = workers or "auto"
    return env


def _place(share: CoreShare, threads: int) -> RankPlacement:
    memory = None if share.numa is None else f"prefer:{share.numa}"
    return RankPlacement(format_cpus(share.cpus), threads, memory, format_cpus(share.workers))
