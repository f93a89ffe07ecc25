"""A job's batch script and mpirun command, with the complete environment of its ranks. Pure."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable, Mapping

from cluster.nodes import Cluster
from infra.errors import UsageError
from infra.words import counted
from jobs.launchers.placement import Placement
from jobs.launchers.plan import JobPaths, JobPlan
from jobs.worker.runtime.events import MARK, mark_of
from jobs.worker.supervisor.launch import FOLDER, LAUNCH, Launch, build_argv
from jobs.worker.supervisor.nodes import PACK
from provision.install import MPIRUN_ENV, VENV
from provision.stacks.stack import BINDING, Stack, environment_lookup

# A replacement node has no files yet, and a node that did not answer has an earlier launch, or none.
_SCRIPT = f"""\
#!/bin/bash
#SBATCH --job-name={{job}}
#SBATCH --nodes={{nodes}}
#SBATCH --output=/dev/null
#SBATCH --{{requeue}}
mkdir -p {{root}} && cd {{root}} || exit 1
exec >> log 2>&1
for node in {{head}} $(cat ~/hosts); do
  [ -d code/worker ] && sha256sum --check --status <<< "{{digest}}  {LAUNCH}" && break
  ssh $node 'cd {{root}} && {PACK}' | tar -xPf -
done 2>/dev/null
export PYTHONPATH={{code}} {MARK}={{mark}} {FOLDER}={{root}}
supervise="{{venv}}/bin/python -m worker.supervisor"
# This shell outlives it if it is killed; only a requeue ends it by TERM. Every TERM interrupts `wait`.
# If this shell is killed as well, the keeper runs it again, with the exit code.
code=$1 asked=
if [ -z "$code" ]; then
  $supervise &
  trap 'asked=1; kill -TERM $! 2>/dev/null' TERM
  asked=1
fi
while [ "$asked" ]; do asked=; wait $!; code=$?; done
[ $code -le 128 ] || [ $code = 143 ] || exec $supervise $code
exit $code
"""
_FIRST_WITH_NEW_NAME = "1.12"
# Otherwise Intel MPI ignores -ppn and starts as many ranks per node as Slurm counts tasks.
_IN_QUEUE = {"I_MPI_JOB_RESPECT_PROCESS_PLACEMENT": "off"}
# Set by the placement: a stack's own values would put several threads on one core.
_PLACED = frozenset(
    {
        *("OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY"),
        *("KMP_AFFINITY", "KMP_HW_SUBSET", "CCL_WORKER_COUNT", "CCL_WORKER_AFFINITY"),
    }
)


def build_launch(
    plan: JobPlan, placement: Placement, paths: JobPaths, cluster: Cluster, stack: Stack
) -> Launch:
    """Return the command that starts a job on nodes of ``cluster``; its placement covers all of them."""
    shares = placement.shares or ((),) * len(cluster.nodes)
    planned = len(cluster.first(plan.spec.resources.nodes).nodes)
    least = plan.spec.recovery.least_nodes
    if least > planned:
        raise UsageError(
            f"--elastic {least}: the job starts on {counted(planned, 'node')}",
            hint="it is the minimum number of nodes to continue with after a loss",
        )
    return Launch(
        spec=plan.spec,
        folder=paths.root,
        head=cluster.head.name,
        mpirun=f"{VENV}/bin/mpirun",
        program=(f"{VENV}/bin/python", "-m", plan.module, *plan.argv),
        resumes=plan.resumes,
        nproc_per_node=placement.nproc_per_node,
        env={
            **_without_given(cluster.environment, plan.variables),
            **rank_environment(plan, placement, paths.code, stack),
            MARK: mark_of(paths.job_id),
        },
        pinning=dict(zip((node.name for node in cluster.nodes), shares, strict=True)),
        omp_threads=placement.omp_threads,
        ccl=placement.backend == "ccl",
        exports={**MPIRUN_ENV, **_IN_QUEUE},
        setup=ccl_setup(stack) if plan.backend == "ccl" else (),
        planned_nodes=max(planned, plan.planned_nodes),
    )


def _without_given(environment: Mapping[str, str], words: Iterable[str]) -> dict[str, str]:
    """Return the cluster's variables without those that the user sets, in upper or lower case."""
    given = {word.partition("=")[0].lower() for word in words}
    return {name: value for name, value in environment.items() if name.lower() not in given}


def render_command(launch: Launch, address: str) -> str:
    """Return the mpirun command of a job if the first of its nodes, with this address, is idle."""
    return shlex.join(build_argv(launch, [*launch.pinning][: launch.planned_nodes], address))


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


def ccl_setup(stack: Stack) -> tuple[str, ...]:
    """Return the lines that load oneCCL's environment from where the bindings find it."""
    lookup = environment_lookup(stack.pin(BINDING) or _FIRST_WITH_NEW_NAME)
    return (
        f"ccl=$({VENV}/bin/python -c {shlex.quote(lookup)}) || exit 1",
        '. "$ccl/env/setvars.sh" || exit 1',
    )


def render_batch_script(launch: Launch, paths: JobPaths) -> str:
    """Return the script that the queue runs on the job's first node."""
    # A job that began on a larger cluster continues on this one.
    recovery = launch.spec.recovery
    least, most = recovery.least_nodes, min(launch.planned_nodes, len(launch.pinning))
    return _SCRIPT.format(
        job=paths.job_id,
        venv=VENV,
        nodes=f"{least}-{most}" if 0 < least < most else most,
        requeue="requeue" if recovery.retries else "no-requeue",
        root=shlex.quote(paths.root),
        code=shlex.quote(paths.code),
        mark=mark_of(paths.job_id),
        head=launch.head,
        digest=hashlib.sha256(launch.render()).hexdigest(),
    )
