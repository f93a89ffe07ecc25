"""A training job as files for another Slurm cluster: script, installation, code, data. Pure.

The folder with these files is the job's folder, as on the tool's own clusters, so its plan is the same.
torchrun starts the ranks, as on Kubernetes, because mpirun is set up differently at every center.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from infra.errors import UsageError
from jobs.launchers.files import worker_files
from jobs.launchers.launcher import check_forms
from jobs.launchers.mpirun import rank_environment
from jobs.launchers.placement import NodeShape, Placement, Preload, place_on
from jobs.launchers.plan import CHECKPOINT_SECONDS, JobPlan
from provision.stacks.stack import Stack, pip_options, render_import_check, render_requirements

SCRIPT, INSTALL, REQUIREMENTS = "job.sbatch", "install.sh", "requirements.txt"
OURS = (SCRIPT, INSTALL, REQUIREMENTS, "code")
"""Subfolders of every job's folder."""
# The ranks finish a step, agree to stop, save the checkpoint, and exit.
_STOP_SECONDS = CHECKPOINT_SECONDS + 60
_SHORTEST_MINUTES = 10
_OLDEST_PYTHON = "3.10"
_FORMS = {
    "name": (r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", "letters, digits, and _.-, at most 64"),
    "partition": (r"[A-Za-z0-9_.,-]+", "a partition's name, or several with commas"),
    "account": (r"[A-Za-z0-9_.@-]+", "an account's name"),
    # Not MINUTES:SS: Slurm would accept 8:00, but users mean eight hours.
    "time": (r"\d+|\d+:\d\d:\d\d|\d+-\d\d?(:\d\d){0,2}", "MINUTES, HOURS:MM:SS, or DAYS-HOURS"),
    "constraint": (r"[A-Za-z0-9_.&|*()\[\]-]+", "features of nodes, such as amx or 'a&b'"),
    "interface": (r"[A-Za-z0-9_.-]{1,15}", "a network interface's name, such as ib0"),
}
_PASSED_ON = ("partition", "account", "time", "constraint")
_HEADER = """\
#!/bin/bash
# Trains a model with spr-cluster's code. In this file's folder, run
# `bash {install}` once, then `sbatch {script}`.
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
# One task per node: torchrun, which starts the node's ranks.
#SBATCH --ntasks-per-node=1
# Whole nodes, with all of their memory, and none with fewer CPUs than the ranks have threads.
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --mincpus={cores}
{passed_on}# One log, also of later attempts.
#SBATCH --output=log
#SBATCH --open-mode=append
# After the loss of a node, the job starts again, and resumes from its newest checkpoint.
#SBATCH --requeue
# Two jobs must not write to one folder: of a user's jobs with this name, one runs at a time.
#SBATCH --dependency=singleton
# So many seconds before the time limit, this script (B) has the ranks save a checkpoint, and puts the job
# back into the queue.
#SBATCH --signal=B:USR1@{stop}

again=
# Without --batch, scancel signals only the steps: torchrun, which passes the signal on to its ranks.
trap 'again=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
# After `scancel` and before a preemption, Slurm also sends this to the ranks. Wait for them.
trap : TERM

# {placed}
# What the shell that submits the job has set about threads would undo this.
unset "${{!OMP_@}}" "${{!GOMP_@}}" "${{!KMP_@}}"
# In a shell that srun has started, the variables of its MPI number the ranks: all would be rank 0.
unset "${{!PMI@}}" "${{!MPI_LOCAL@}}"
{exports}
# Time for a checkpoint: torchrun's own limit is 30 s.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={checkpoint}
# {install} has downloaded what the job needs from the hub.
export HF_HUB_OFFLINE=1
nproc_per_node={ranks}
program=({program})
"""
_INSTALL_HEADER = """\
#!/bin/bash
# Makes venv/ with stack {stack}. Run it once, where the internet can be reached; it needs no root.
"""


@dataclass(frozen=True)
class ScriptOptions:
    """A job's Slurm options; ``None`` uses the cluster's default.

    ``interface`` is the network interface of the ranks' traffic. Raises :class:`UsageError` for a value
    that is invalid in Slurm or in a script's line.
    """

    name: str
    nodes: int
    shape: NodeShape
    partition: str | None = None
    account: str | None = None
    time: str | None = None
    constraint: str | None = None
    interface: str | None = None

    def __post_init__(self) -> None:
        check_forms(self, _FORMS)
        # 0 is no limit.
        if self.time and 0 < _minutes(self.time) < _SHORTEST_MINUTES:
            raise UsageError(
                f"--time {self.time}: too short: {_STOP_SECONDS} s before its end, the job stops with a "
                "checkpoint",
                hint=f"give {_SHORTEST_MINUTES} minutes or more",
            )


@dataclass(frozen=True)
class SlurmScript:
    """A job for a Slurm cluster: its script and all files of its folder, including the script."""

    options: ScriptOptions
    placement: Placement
    text: str
    files: Mapping[str, Path | bytes]


def render_slurm(plan: JobPlan, options: ScriptOptions, stack: Stack) -> SlurmScript:
    """Return a training job's script and files. Raises :class:`UsageError` for nodes that don't fit it."""
    shape = options.shape
    usable = shape.cores // shape.numa
    placement = place_on(shape, usable, plan.placement, plan.backend, Preload())
    placement = replace(placement, interface=options.interface or "")
    text = _render_script(plan, placement, options, stack)
    files = {
        SCRIPT: text.encode(),
        INSTALL: _render_install(plan, stack).encode(),
        REQUIREMENTS: render_requirements(stack).encode(),
        **worker_files(),
        **plan.files,
    }
    return SlurmScript(options, placement, text, files)


def _minutes(time: str) -> float:
    days, _, rest = time.rpartition("-")
    # HOURS:MM:SS after days, and HOURS:MM:SS or MINUTES without.
    parts = [int(part) for part in rest.split(":")]
    if not days and len(parts) == 1:
        return parts[0]
    hours, minutes, seconds = [*parts, 0, 0][:3]
    return (int(days or 0) * 24 + hours) * 60 + minutes + seconds / 60


def _render_script(
    plan: JobPlan, placement: Placement, options: ScriptOptions, stack: Stack
) -> str:
    ranks, threads = placement.nproc_per_node, placement.omp_threads
    passed_on = {name: getattr(options, name) for name in _PASSED_ON}
    # The plan turns the hub off only for jobs that don't need it; here it is off for all.
    env = rank_environment(replace(plan, env={}), placement, "", stack)
    # gloo ignores libfabric's variables.
    exports = {name: value for name, value in env.items() if not name.startswith("FI_")}
    header = _HEADER.format(
        script=SCRIPT,
        name=options.name,
        nodes=options.nodes,
        cores=options.shape.cores,
        passed_on="".join(f"#SBATCH --{n}={v}\n" for n, v in passed_on.items() if v),
        stop=_STOP_SECONDS,
        placed=f"{ranks} x {threads} = {ranks * threads} of a node's {options.shape.cores} cores: each "
        "rank finds the CPUs that it may use, and takes its own.",
        exports="\n".join(f"export {n}={shlex.quote(v)}" for n, v in exports.items()),
        checkpoint=CHECKPOINT_SECONDS,
        install=INSTALL,
        ranks=ranks,
        # With these arguments, the job resumes; without a checkpoint, it starts from the beginning.
        program=shlex.join([plan.module, *plan.retry_argv]),
    )
    return header + _read("job.sh")


def _render_install(plan: JobPlan, stack: Stack) -> str:
    # A lock's wheels fit one version of Python.
    python = stack.python if stack.lock else _OLDEST_PYTHON
    compare, more = ("==", "") if stack.lock else (">=", " or newer")
    values = {
        "wanted": python + more,
        "condition": f"sys.version_info[:2] {compare} ({python.replace('.', ', ')})",
        "example": stack.python,
        "pip": stack.pip,
        "options": pip_options(stack),
        "check": render_import_check(stack),
    }
    lines = [f"{name}={shlex.quote(value)}" for name, value in values.items()]
    lines.append(f"train=({shlex.join(plan.argv)})")
    return _INSTALL_HEADER.format(stack=stack.name) + "\n".join([*lines, _read(INSTALL)])


def _read(name: str) -> str:
    return resources.files("jobs.launchers.script").joinpath(name).read_text()
