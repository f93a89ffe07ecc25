"""A job's batch script and mpirun command, with the complete environment of its ranks. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.nodes import Cluster
from infra.errors import UsageError
from infra.words import counted
from jobs.launch.cores import CoreShare, cpu_mask
from jobs.launch.placement import Placement, RankLayout
from jobs.launch.plan import JobPaths, JobPlan
from jobs.worker.batch.launch import Launch, build_argv
from jobs.worker.batch.nodes import PARTS
from jobs.worker.runtime.pinning import VARIABLE, RankPlacement, format_cpus, render_plan
from provision.install import VENV
from provision.mpi import MPIRUN_ENV
from provision.stacks.oneccl import environment_lookup
from provision.stacks.stack import BINDING, Stack

_END = "_END_OF_THE_LAUNCH_"
_FIRST_WITH_NEW_NAME = "1.12"
# Otherwise Intel MPI starts as many ranks on a node as Slurm has counted tasks, whatever -ppn says.
_IN_QUEUE = {"I_MPI_JOB_RESPECT_PROCESS_PLACEMENT": "off"}
# Set by the placement: a stack's own values would put several threads on one core.
_PLACED = frozenset(
    {
        *("OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY"),
        *("KMP_AFFINITY", "KMP_HW_SUBSET", "CCL_WORKER_COUNT", "CCL_WORKER_AFFINITY"),
    }
)


@dataclass(frozen=True)
class LaunchCommand:
    """How a job starts on as many of the nodes in ``launch`` as are ``planned``: these, if idle."""

    launch: Launch
    planned: tuple[str, ...]
    address: str
    """The private address of the first planned node."""
    warnings: tuple[str, ...] = ()
    least: int = 0
    """The least number of nodes; 0 for all that are planned."""

    @property
    def nodes(self) -> str:
        """The number of nodes, as the queue takes it."""
        most = len(self.planned)
        return f"{self.least}-{most}" if 0 < self.least < most else str(most)

    @property
    def argv(self) -> list[str]:
        """The mpirun command on the planned nodes."""
        return build_argv(self.launch, self.planned, self.address)

    def __str__(self) -> str:
        return shlex.join(self.argv)


def build_launch_command(
    plan: JobPlan, placement: Placement, paths: JobPaths, cluster: Cluster, stack: Stack
) -> LaunchCommand:
    """Return how a job starts on nodes of ``cluster``, for all of which it was placed."""
    layout = placement.ranks
    pinned = [pinning_environment(plan, layout, shares) for shares in layout.shares]
    each = pinned or [_unpinned(plan, layout)] * len(cluster.nodes)
    lookup = environment_lookup(stack.pin(BINDING) or _FIRST_WITH_NEW_NAME)
    program = (f"{VENV}/bin/python", "-m", plan.module)
    planned = tuple(node.name for node in cluster.first(plan.nodes).nodes)
    if plan.elastic and plan.elastic > len(planned):
        raise UsageError(
            f"--elastic {plan.elastic}: the job starts on {counted(len(planned), 'node')}",
            hint="it is the least number of nodes with which the job goes on after a loss",
        )
    launch = Launch(
        folder=paths.root,
        head=cluster.head.name,
        mpirun=f"{VENV}/bin/mpirun",
        program=(*program, *plan.argv),
        again=(*program, *plan.retry_argv) if plan.retry_argv else (),
        nproc_per_node=layout.nproc_per_node,
        env=rank_environment(plan, placement, paths, stack),
        pinning=dict(zip((node.name for node in cluster.nodes), each, strict=True)),
        exports={**MPIRUN_ENV, **_IN_QUEUE},
        setup=_ccl_setup(lookup) if plan.backend == "ccl" else (),
        retries=plan.retries,
        planned_nodes=len(planned) if plan.elastic else 0,
    )
    warnings = (*layout.warnings, *_warn_ignored(stack, placement))
    address = cluster.head.private_ip
    return LaunchCommand(launch, planned, address, warnings, plan.elastic or len(planned))


def _ignored(stack: Stack, placement: Placement) -> frozenset[str]:
    """Return the stack's variables about threads and cores, which the placement overrides."""
    is_pinned = bool(placement.ranks.shares)  # not so in the published recipe
    return _PLACED & stack.environment.keys() if is_pinned else frozenset()


def _warn_ignored(stack: Stack, placement: Placement) -> tuple[str, ...]:
    names = ", ".join(sorted(_ignored(stack, placement)))
    return (f"ignoring {names} from the stack: the placement sets them",) if names else ()


def rank_environment(
    plan: JobPlan, placement: Placement, paths: JobPaths, stack: Stack
) -> dict[str, str]:
    """Return the environment that all ranks on all nodes share."""
    env = {
        "FI_PROVIDER": "tcp",
        "FI_TCP_IFACE": placement.interface,
        # Otherwise gloo binds to the hostname's address, which may be 127.0.1.1.
        "GLOO_SOCKET_IFNAME": placement.interface,
        "PYTHONPATH": paths.code,
        "PYTHONUNBUFFERED": "1",
        "LD_PRELOAD": ":".join(filter(None, (placement.iomp5, placement.tcmalloc))),
    }
    env |= _openmp_environment(placement)
    if plan.backend == "ccl":
        env |= {
            "CCL_WORKER_COUNT": str(placement.ranks.ccl_workers),
            "CCL_ATL_TRANSPORT": "ofi",
            # Where oneCCL's ranks meet; by default it takes the first interface that it finds.
            "CCL_KVS_IFACE": placement.interface,
        }
    ignored = _ignored(stack, placement)
    env |= {name: value for name, value in stack.environment.items() if name not in ignored}
    env |= plan.env
    return {name: value for name, value in env.items() if value}


def _openmp_environment(placement: Placement) -> dict[str, str]:
    env = {"OMP_NUM_THREADS": str(placement.ranks.omp_threads)}
    if not placement.ranks.shares:
        # As published; only Intel's OpenMP reads it.
        return env | {"KMP_HW_SUBSET": "1T"}
    if placement.iomp5:
        # From Intel's MLPerf runs. Not with OMP_PROC_BIND: libgomp, if also loaded, would bind the main
        # thread to one CPU, and libiomp5 would put all its threads there [tried].
        return env | {"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"}
    # libgomp would bind the main thread, whose children (gloo's and the tokenizer's threads)
    # inherit that one CPU [tried: torch 2.13]. The rank's domain has exactly one CPU per thread.
    return env | {"OMP_PROC_BIND": "false"}


def pinning_environment(
    plan: JobPlan, layout: RankLayout, shares: Sequence[CoreShare]
) -> dict[str, str]:
    """Return the environment of one node's ranks: their CPUs, and the plan that each rank checks."""
    env = {
        # Without 0x, Intel MPI prints an IPL2 error and chooses the pinning itself [tried].
        "I_MPI_PIN_DOMAIN": f"[{','.join(hex(cpu_mask(share.cpus)) for share in shares)}]",
        VARIABLE: render_plan(_place(share, layout.omp_threads) for share in shares),
    }
    if plan.backend == "ccl":
        # One entry per worker of the node. "auto" would take the last CPUs of each domain:
        # https://oneapi-src.github.io/oneCCL/general-configuration/operation-execution.html
        workers = [str(cpu) for share in shares for cpu in share.workers]
        env["CCL_WORKER_AFFINITY"] = ",".join(workers)
    return env


def _place(share: CoreShare, threads: int) -> RankPlacement:
    memory = None if share.numa is None else f"prefer:{share.numa}"
    return RankPlacement(format_cpus(share.cpus), threads, memory, format_cpus(share.workers))


def _unpinned(plan: JobPlan, layout: RankLayout) -> dict[str, str]:
    place = RankPlacement(cpus=None, threads=layout.omp_threads, memory=None)
    env = {VARIABLE: render_plan([place] * layout.nproc_per_node)}
    return env | {"CCL_WORKER_AFFINITY": "auto"} if plan.backend == "ccl" else env


def _ccl_setup(lookup: str) -> tuple[str, ...]:
    """Return the lines that load oneCCL's environment from where the bindings find it."""
    return (
        f"ccl=$({VENV}/bin/python -c {shlex.quote(lookup)}) || exit 1",
        '. "$ccl/env/setvars.sh" || exit 1',
    )


def render_batch_script(command: LaunchCommand, paths: JobPaths) -> str:
    """Return the script that the queue runs on the job's first node."""
    options = {
        "job-name": paths.job_id,
        "nodes": command.nodes,
        # A node that was replaced has no folder for it yet.
        "output": "/dev/null",
        "open-mode": "append",
    }
    root = shlex.quote(paths.root)
    requeue = "requeue" if command.launch.retries else "no-requeue"
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH --{name}={value}" for name, value in options.items()),
            f"#SBATCH --{requeue}",
            f"mkdir -p {root} && cd {root} || exit 1",
            "exec >> log 2>&1",
            "[ -d code/worker ] || "
            f"ssh {command.launch.head} 'cd {root} && tar -cf - $(ls -d {PARTS} 2>/dev/null)' | "
            "tar -xf -",
            f"export PYTHONPATH={shlex.quote(paths.code)}",
            f"exec {VENV}/bin/python -m worker.batch <<'{_END}'",
            command.launch.render().decode().rstrip("\n"),
            _END,
            "",
        ]
    )
