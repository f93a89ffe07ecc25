"""The command that starts a job on all nodes: Intel MPI's mpirun, with its whole environment. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jobs.placement import Placement, RankLayout
from jobs.shares import Share, cpu_mask
from jobs.spec import JobPaths, JobSpec
from jobs.squad.pinning import VARIABLE, Place, format_cpus, render_plan
from provision.install import VENV
from provision.stacks.oneccl import FROM_1_12

MASTER_PORT = 29500
# Which threads run where is the placement's to say: a stack's own word would put more on a core.
_PLACED = frozenset(
    {
        *("OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY"),
        *("KMP_AFFINITY", "KMP_HW_SUBSET", "CCL_WORKER_COUNT", "CCL_WORKER_AFFINITY"),
    }
)
HOSTFILE = "/home/ubuntu/hosts"
# Where PyPI's impi-rt puts mpirun, its libraries and libfabric's providers.
MPIRUN_ENV = {
    "PATH": f"{VENV}/bin:/usr/local/bin:/usr/bin:/bin",
    "I_MPI_ROOT": VENV,
    "LD_LIBRARY_PATH": f"{VENV}/lib",
    "FI_PROVIDER_PATH": f"{VENV}/lib",
}


@dataclass(frozen=True)
class LaunchCommand:
    """``argv`` of mpirun, the environment that it needs itself, and lines to run before it."""

    argv: tuple[str, ...]
    env: dict[str, str]
    setup: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return shlex.join(self.argv)


def build_launch_command(
    job: JobSpec, placement: Placement, paths: JobPaths, master_addr: str
) -> LaunchCommand:
    """The mpirun line of a job. ``master_addr`` is the head's private address."""
    layout = placement.ranks
    pinned = [pinning_environment(job, layout, shares) for shares in layout.shares]
    shared = rank_environment(job, placement, paths, master_addr)
    program = [f"{VENV}/bin/python", "-m", job.module, *job.argv]
    argv = [f"{VENV}/bin/mpirun", "-f", HOSTFILE]
    count, ppn = ["-n", str(job.world_size)], ["-ppn", str(job.nproc_per_node)]
    bootstrap = ["-bootstrap", "ssh", "-wdir", paths.root]
    if all(each == pinned[0] for each in pinned):
        shared |= pinned[0] if pinned else _unpinned(job, layout)
        argv += [*count, *ppn, *bootstrap, *_options("-genv", shared), *program]
    else:
        # Hydra's proxy reads a node's pinning from the first argument set of that node [tried:
        # 2021.18], and -ppn fills the nodes in the hostfile's order, so one set for each of them.
        argv += [*ppn, *bootstrap, *_options("-genv", shared)]
        for each in pinned:
            separator = [":"] if each is not pinned[0] else []
            argv += [*separator, "-n", str(job.nproc_per_node), *_options("-env", each), *program]
    setup = _ccl_setup(job.ccl_lookup or FROM_1_12) if job.backend == "ccl" else ()
    warnings = (*layout.warnings, *_tell_left_out(job, placement))
    return LaunchCommand(tuple(argv), dict(MPIRUN_ENV), setup, warnings)


def _left_out(job: JobSpec, placement: Placement) -> frozenset[str]:
    """What the job's environment says of threads and cores, where they are shared out otherwise."""
    is_shared_out = bool(placement.ranks.shares)  # not so in the published recipe
    return _PLACED & job.env.keys() if is_shared_out else frozenset()


def _tell_left_out(job: JobSpec, placement: Placement) -> tuple[str, ...]:
    names = ", ".join(sorted(_left_out(job, placement)))
    return (f"{names} of the stack's environment left out: the placement decides",) if names else ()


def _options(flag: str, env: Mapping[str, str]) -> list[str]:
    return [word for name, value in env.items() for word in (flag, name, value)]


def rank_environment(
    job: JobSpec, placement: Placement, paths: JobPaths, master_addr: str
) -> dict[str, str]:
    """What every rank of every node finds in its environment."""
    env = {
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(MASTER_PORT),
        "FI_PROVIDER": placement.fabric,
        "FI_TCP_IFACE": placement.interface if placement.fabric == "tcp" else "",
        # Otherwise gloo binds to its hostname's address, which may be 127.0.1.1.
        "GLOO_SOCKET_IFNAME": placement.interface,
        "PYTHONPATH": paths.code,
        "PYTHONUNBUFFERED": "1",
        "LD_PRELOAD": ":".join(filter(None, (placement.iomp5, placement.tcmalloc))),
    }
    env |= _openmp_environment(placement)
    if job.backend == "ccl":
        env |= {
            "CCL_WORKER_COUNT": str(placement.ranks.ccl_workers),
            "CCL_ATL_TRANSPORT": "ofi",
            # Where oneCCL's ranks meet; by default it takes the first interface that it finds.
            "CCL_KVS_IFACE": placement.interface,
        }
    left_out = _left_out(job, placement)
    env |= {name: value for name, value in job.env.items() if name not in left_out}
    return {name: value for name, value in env.items() if value}


def _openmp_environment(placement: Placement) -> dict[str, str]:
    env = {"OMP_NUM_THREADS": str(placement.ranks.omp_threads)}
    if not placement.ranks.shares:
        # As the published recipe has it; it counts with Intel's OpenMP only.
        return env | {"KMP_HW_SUBSET": "1T"}
    if placement.iomp5:
        # Of Intel's MLPerf runs. Not together with OMP_PROC_BIND: libgomp, loaded beside it, would
        # then bind the main thread to one CPU, and libiomp5 put all its threads there [tried].
        return env | {"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"}
    # libgomp would bind the main thread, whose children (gloo's and the tokenizer's threads)
    # inherit that one CPU [tried: torch 2.13]. The rank's domain has no CPU more than threads.
    return env | {"OMP_PROC_BIND": "false"}


def pinning_environment(
    job: JobSpec, layout: RankLayout, shares: Sequence[Share]
) -> dict[str, str]:
    """What the ranks of one node find in theirs: their CPUs and what the check in them expects."""
    env = {
        # A mask needs its 0x: without, Intel MPI prints an IPL2 error and pins as it likes [tried].
        "I_MPI_PIN_DOMAIN": f"[{','.join(hex(cpu_mask(share.cpus)) for share in shares)}]",
        VARIABLE: render_plan(_place(share, layout.omp_threads) for share in shares),
    }
    if job.backend == "ccl":
        # One entry per worker of the node. "auto" would take the last CPUs of each domain:
        # https://oneapi-src.github.io/oneCCL/general-configuration/operation-execution.html
        workers = [str(cpu) for share in shares for cpu in share.workers]
        env["CCL_WORKER_AFFINITY"] = ",".join(workers)
    return env


def _place(share: Share, threads: int) -> Place:
    memory = None if share.numa is None else f"prefer:{share.numa}"
    return Place(format_cpus(share.cpus), threads, memory, format_cpus(share.workers))


def _unpinned(job: JobSpec, layout: RankLayout) -> dict[str, str]:
    place = Place(cpus=None, threads=layout.omp_threads, memory=None)
    env = {VARIABLE: render_plan([place] * layout.nproc_per_node)}
    return env | {"CCL_WORKER_AFFINITY": "auto"} if job.backend == "ccl" else env


def _ccl_setup(lookup: str) -> tuple[str, ...]:
    """Load oneCCL's own environment, from the place that the bindings name."""
    return (
        f"ccl=$({VENV}/bin/python -c {shlex.quote(lookup)}) || exit 1",
        '. "$ccl/env/setvars.sh" || exit 1',
    )


def render_run_script(command: LaunchCommand, paths: JobPaths) -> str:
    """The script that runs on the head, detached: it leaves the job's pid, log and exit code."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in command.env.items()]
    return "\n".join(
        [
            "#!/bin/bash",
            f"cd {shlex.quote(paths.root)} || exit 1",
            f"trap 'echo $? > {paths.exit_code}' EXIT",
            "trap 'exit 143' TERM",
            # Last: whoever reads it may end the job at once.
            f"echo $$ > {paths.pid}",
            f"exec < /dev/null > {paths.log} 2>&1",
            *command.setup,
            # After the set-up: oneCCL's own script points to an older MPI that it brings.
            *exports,
            f"{command}",
            "",
        ]
    )
