"""The command that starts a job on all nodes: Intel MPI's mpirun, with its whole environment. Pure."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from jobs.placement import Placement
from jobs.spec import JobPaths, JobSpec
from provision.install import VENV

MASTER_PORT = 29500
HOSTFILE = "/home/ubuntu/hosts"


@dataclass(frozen=True)
class LaunchCommand:
    """``argv`` of mpirun, the environment that it needs itself, and lines to run before it."""

    argv: tuple[str, ...]
    env: dict[str, str]
    setup: tuple[str, ...] = ()

    def __str__(self) -> str:
        return shlex.join(self.argv)


def build_launch_command(
    job: JobSpec, placement: Placement, paths: JobPaths, master_addr: str
) -> LaunchCommand:
    """The mpirun line of a job. ``master_addr`` is the head's private address."""
    argv = [
        f"{VENV}/bin/mpirun",
        "-f",
        HOSTFILE,
        "-n",
        str(job.world_size),
        "-ppn",
        str(job.nproc_per_node),
    ]
    argv += ["-bootstrap", "ssh", "-wdir", paths.root]
    for name, value in rank_environment(job, placement, paths, master_addr).items():
        argv += ["-genv", name, value]
    argv += [f"{VENV}/bin/python", "-m", job.module, *job.argv]
    # Where PyPI's impi-rt puts mpirun, its libraries and libfabric's providers.
    env = {
        "PATH": f"{VENV}/bin:/usr/local/bin:/usr/bin:/bin",
        "I_MPI_ROOT": VENV,
        "LD_LIBRARY_PATH": f"{VENV}/lib",
        "FI_PROVIDER_PATH": f"{VENV}/lib",
    }
    return LaunchCommand(tuple(argv), env, _ccl_setup() if job.backend == "ccl" else ())


def rank_environment(
    job: JobSpec, placement: Placement, paths: JobPaths, master_addr: str
) -> dict[str, str]:
    """What every rank finds in its environment."""
    env = {
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(MASTER_PORT),
        "OMP_NUM_THREADS": str(placement.omp_threads),
        # Intel MPI cuts the node's allowed cores into one domain per rank.
        "I_MPI_PIN_DOMAIN": "auto",
        "FI_PROVIDER": "tcp",
        "FI_TCP_IFACE": placement.interface,
        # Otherwise gloo binds to its hostname's address, which may be 127.0.1.1.
        "GLOO_SOCKET_IFNAME": placement.interface,
        "PYTHONPATH": paths.code,
        "PYTHONUNBUFFERED": "1",
    }
    if placement.tcmalloc:
        env["LD_PRELOAD"] = placement.tcmalloc
    if job.backend == "ccl":
        env |= {
            "CCL_WORKER_COUNT": str(placement.ccl_workers),
            "CCL_ATL_TRANSPORT": "ofi",
            # Where oneCCL's ranks meet; by default it takes the first interface that it finds.
            "CCL_KVS_IFACE": placement.interface,
        }
    return {name: value for name, value in (env | job.env).items() if value}


def _ccl_setup() -> tuple[str, ...]:
    """Load oneCCL's own environment, whose place the bindings know (from 1.12 on)."""
    ask = "import oneccl_bindings_for_pytorch as ccl; print(ccl.cwd)"
    return (
        f"ccl=$({VENV}/bin/python -c {shlex.quote(ask)}) || exit 1",
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
