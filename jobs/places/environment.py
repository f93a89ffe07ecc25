"""The complete environment of a job's ranks, wherever they run. Pure."""

from __future__ import annotations

import shlex

from jobs.places.placement import Placement
from jobs.places.plan import JobPlan
from provision.install import VENV
from provision.stacks.stack import ENVIRONMENT_LOOKUP, Stack

# Set by the placement: a stack's own values would put several threads on one core.
_PLACED = frozenset(
    {
        *("OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY"),
        *("KMP_AFFINITY", "KMP_HW_SUBSET", "CCL_WORKER_COUNT", "CCL_WORKER_AFFINITY"),
    }
)


def _ignored(stack: Stack, placement: Placement) -> frozenset[str]:
    """Return the stack's variables about threads and cores, which the placement overrides."""
    is_pinned = bool(placement.shares)  # not so in the published recipe
    return _PLACED & stack.environment.keys() if is_pinned else frozenset()


def warn_ignored(stack: Stack, placement: Placement) -> tuple[str, ...]:
    """Return a warning if the placement overrides variables of the stack."""
    names = ", ".join(sorted(_ignored(stack, placement)))
    return (f"ignoring {names} from the stack: the placement sets them",) if names else ()


def rank_environment(
    plan: JobPlan, placement: Placement, code: str, stack: Stack
) -> dict[str, str]:
    """Return the environment of all ranks on all nodes; ``code`` is the folder of our modules."""
    env = {
        "FI_PROVIDER": "tcp",
        "FI_TCP_IFACE": placement.interface,
        # Otherwise gloo binds to the hostname's address, which may be 127.0.1.1.
        "GLOO_SOCKET_IFNAME": placement.interface,
        "PYTHONPATH": code,
        "PYTHONUNBUFFERED": "1",
        "LD_PRELOAD": ":".join(filter(None, (placement.iomp5, placement.tcmalloc))),
    }
    env |= _openmp_environment(placement)
    if plan.backend == "ccl":
        env |= {
            "CCL_WORKER_COUNT": str(placement.ccl_workers),
            # The thread that waits for a collective spins on the rank's own CPUs. Yielding helps:
            # 113 instead of 19 samples/s on 3 nodes that share 2 CPUs [tried: oneCCL 2021.14].
            "CCL_YIELD": "sched_yield",
            "CCL_ATL_TRANSPORT": "ofi",
            # It warns about every variable that differs from its default, including this one.
            "CCL_LOG_LEVEL": "error",
            # Where oneCCL's ranks meet; by default it takes the first interface that it finds.
            "CCL_KVS_IFACE": placement.interface,
            # For 8 KiB to 1 MiB, its own choice (nreduce) sums in the order of arrival: with four ranks, a
            # resumed run would differ in the last bits [tried: oneCCL 2021.14].
            "CCL_ALLREDUCE": "recursive_doubling:0-8192;ring:8193-max",
        }
    ignored = _ignored(stack, placement)
    env |= {name: value for name, value in stack.environment.items() if name not in ignored}
    env |= plan.env
    return {name: value for name, value in env.items() if value}


def _openmp_environment(placement: Placement) -> dict[str, str]:
    env = {"OMP_NUM_THREADS": str(placement.omp_threads)}
    if not placement.shares:
        # As published; only Intel's OpenMP reads it.
        return env | {"KMP_HW_SUBSET": "1T"}
    if placement.iomp5:
        # From Intel's MLPerf runs. Not with OMP_PROC_BIND: libgomp, if also loaded, would bind the main
        # thread to one CPU, and libiomp5 would put all its threads there [tried].
        return env | {"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"}
    # libgomp would bind the main thread, whose children (gloo's and the tokenizer's threads)
    # inherit that one CPU [tried: torch 2.13]. The rank's domain has exactly one CPU per thread.
    return env | {"OMP_PROC_BIND": "false"}


CCL_SETUP = (
    f"ccl=$({VENV}/bin/python -c {shlex.quote(ENVIRONMENT_LOOKUP)}) || exit 1",
    '. "$ccl/env/setvars.sh" || exit 1',
)
"""The lines that load oneCCL's environment from where the bindings find it."""
