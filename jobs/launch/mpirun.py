"""The mpirun command of a job, with the complete environment of its ranks. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.nodes import Cluster
from cluster.running_job import JOB_VARIABLE, NODES_LINE, render_end_of_job
from jobs.launch.cores import CoreShare, cpu_mask
from jobs.launch.placement import Placement, RankLayout
from jobs.launch.plan import JobPaths, JobPlan
from jobs.worker.runtime.events import PREFIX
from jobs.worker.runtime.pinning import VARIABLE, RankPlacement, format_cpus, render_plan
from provision.install import VENV
from provision.mpi import HOSTFILE, MPIRUN_ENV
from provision.stacks.oneccl import environment_lookup
from provision.stacks.stack import BINDING, Stack

MASTER_PORT = 29500
ERROR_GRACE_S = 15
"""Time for mpirun to end a job of which a rank has failed: a node of it may be gone."""
_FIRST_WITH_NEW_NAME = "1.12"
# Set by the placement: a stack's own values would put several threads on one core.
_PLACED = frozenset(
    {
        *("OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY"),
        *("KMP_AFFINITY", "KMP_HW_SUBSET", "CCL_WORKER_COUNT", "CCL_WORKER_AFFINITY"),
    }
)


@dataclass(frozen=True)
class LaunchCommand:
    """mpirun's ``argv`` and own environment, and the shell lines to run before it."""

    argv: tuple[str, ...]
    env: dict[str, str]
    setup: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    nodes: int = 1

    def __str__(self) -> str:
        return shlex.join(self.argv)


def build_launch_command(
    plan: JobPlan, placement: Placement, paths: JobPaths, cluster: Cluster, stack: Stack
) -> LaunchCommand:
    """Return the mpirun line of a job on all nodes of ``cluster``."""
    layout = placement.ranks
    per_node = layout.nproc_per_node
    pinned = [pinning_environment(plan, layout, shares) for shares in layout.shares]
    shared = rank_environment(plan, placement, paths, cluster, stack)
    program = [f"{VENV}/bin/python", "-m", plan.module, *plan.argv]
    argv = [f"{VENV}/bin/mpirun", "-f", HOSTFILE]
    count, ppn = ["-n", str(len(cluster.nodes) * per_node)], ["-ppn", str(per_node)]
    bootstrap = ["-bootstrap", "ssh", "-wdir", paths.root]
    if all(each == pinned[0] for each in pinned):
        shared |= pinned[0] if pinned else _unpinned(plan, layout)
        argv += [*count, *ppn, *bootstrap, *_options("-genv", shared), *program]
    else:
        # Hydra's proxy reads a node's pinning from the first argument set of that node [tried:
        # 2021.18], and -ppn fills the nodes in the hostfile's order, so one set for each of them.
        argv += [*ppn, *bootstrap, *_options("-genv", shared)]
        for each in pinned:
            separator = [":"] if each is not pinned[0] else []
            argv += [*separator, "-n", str(per_node), *_options("-env", each), *program]
    lookup = environment_lookup(stack.pin(BINDING) or _FIRST_WITH_NEW_NAME)
    setup = _ccl_setup(lookup) if plan.backend == "ccl" else ()
    warnings = (*layout.warnings, *_warn_ignored(stack, placement))
    return LaunchCommand(tuple(argv), dict(MPIRUN_ENV), setup, warnings, len(cluster.nodes))


def _ignored(stack: Stack, placement: Placement) -> frozenset[str]:
    """Return the stack's variables about threads and cores, which the placement overrides."""
    is_pinned = bool(placement.ranks.shares)  # not so in the published recipe
    return _PLACED & stack.environment.keys() if is_pinned else frozenset()


def _warn_ignored(stack: Stack, placement: Placement) -> tuple[str, ...]:
    names = ", ".join(sorted(_ignored(stack, placement)))
    return (f"ignoring {names} from the stack: the placement sets them",) if names else ()


def _options(flag: str, env: Mapping[str, str]) -> list[str]:
    return [word for name, value in env.items() for word in (flag, name, value)]


def rank_environment(
    plan: JobPlan, placement: Placement, paths: JobPaths, cluster: Cluster, stack: Stack
) -> dict[str, str]:
    """Return the environment that all ranks on all nodes share."""
    env = {
        "MASTER_ADDR": cluster.head.private_ip,
        "MASTER_PORT": str(MASTER_PORT),
        "FI_PROVIDER": "tcp",
        "FI_TCP_IFACE": placement.interface,
        # Otherwise gloo binds to the hostname's address, which may be 127.0.1.1.
        "GLOO_SOCKET_IFNAME": placement.interface,
        "PYTHONPATH": paths.code,
        JOB_VARIABLE: paths.root,
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


def render_run_script(command: LaunchCommand, paths: JobPaths) -> str:
    """Return the script that runs on the head and writes the job's PID, log, and exit code."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in command.env.items()]
    return "\n".join(
        [
            "#!/bin/bash",
            f"{NODES_LINE}{command.nodes}",
            f"cd {shlex.quote(paths.root)} || exit 1",
            f"trap 'echo $? > {paths.exit_code}' EXIT",
            "trap 'exit 143' TERM",
            # After the traps: as soon as the PID is there, the job may be cancelled.
            f"echo $$ > {paths.pid}",
            f"exec < /dev/null > {paths.log} 2>&1",
            f"setsid -f bash -c {shlex.quote(_render_watch(paths))} watch $$ > /dev/null 2>&1",
            f"export {JOB_VARIABLE}={shlex.quote(paths.root)}",
            *command.setup,
            # After the setup: oneCCL's script points to the older MPI that it ships.
            *exports,
            f"{command}",
            "",
        ]
    )


def _render_watch(paths: JobPaths) -> str:
    """Return the commands that end the job if mpirun does not, some time after a rank has failed.

    They run beside the job's script, whose PID is ``$1``, and end with it.
    """
    error = f'{PREFIX}{{"event": "error"'
    return (
        f"grep -aqm1 {shlex.quote(error)} < <(tail -n +1 -F -s 1 --pid=$1 {paths.log}) || exit\n"
        f"timeout {ERROR_GRACE_S} tail -f --pid=$1 /dev/null && exit\n"
        f"{render_end_of_job(paths.job_id, 0)}"
    )
