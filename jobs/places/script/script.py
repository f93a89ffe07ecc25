"""A training job as files for another Slurm cluster: script, installation, code, data. Pure.

The folder with these files is the job's folder, as on the tool's own clusters, so its plan is the same.
torchrun starts the ranks, as on Kubernetes, because mpirun is set up differently at every center.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from infra.errors import UsageError
from jobs.places.environment import rank_environment
from jobs.places.files import worker_files
from jobs.places.placement import NodeShape, Placement, Preload, place_on
from jobs.places.plan import CHECKPOINT_SECONDS, JobPlan
from provision.stacks.stack import Stack, pip_options, render_import_check, render_requirements

SCRIPT, INSTALL, REQUIREMENTS = "job.sbatch", "install.sh", "requirements.txt"
OURS = (SCRIPT, INSTALL, REQUIREMENTS, "code")
"""What is in every job's folder."""
# The ranks finish a step, agree to stop, save the checkpoint, and exit.
_STOP_SECONDS = CHECKPOINT_SECONDS + 60
_OLDEST_PYTHON = "3.10"
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
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
# One log, also of later attempts.
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
    """A job's name, and its nodes. Raises :class:`UsageError` for a name that is invalid in a script's line.

    Others, such as a partition, are options of ``sbatch``, or lines that users add to the script.
    """

    name: str
    nodes: int
    shape: NodeShape

    def __post_init__(self) -> None:
        if not re.fullmatch(_NAME, self.name, re.ASCII):
            raise UsageError(
                f"--job-name {self.name!r}: expected letters, digits, and _.-, at most 64"
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
    placement = place_on(shape, usable, plan.spec.resources.placement, plan.backend, Preload())
    text = _render_script(plan, placement, options, stack)
    files = {
        SCRIPT: text.encode(),
        INSTALL: _render_install(plan, stack).encode(),
        REQUIREMENTS: render_requirements(stack).encode(),
        **worker_files(),
        **plan.files,
    }
    return SlurmScript(options, placement, text, files)


def _render_script(
    plan: JobPlan, placement: Placement, options: ScriptOptions, stack: Stack
) -> str:
    ranks, threads = placement.nproc_per_node, placement.omp_threads
    env = rank_environment(plan, placement, "", stack)
    # gloo ignores libfabric's variables. The plan turns the hub off only for jobs that don't need it; here it
    # is off for all.
    others = ("FI_", "HF_HUB_OFFLINE")
    exports = {name: value for name, value in env.items() if not name.startswith(others)}
    header = _HEADER.format(
        script=SCRIPT,
        name=options.name,
        nodes=options.nodes,
        cores=options.shape.cores,
        stop=_STOP_SECONDS,
        placed=f"{ranks} x {threads} = {ranks * threads} of a node's {options.shape.cores} cores: each "
        "rank finds the CPUs that it may use, and takes its own.",
        exports="\n".join(f"export {n}={shlex.quote(v)}" for n, v in exports.items()),
        checkpoint=CHECKPOINT_SECONDS,
        install=INSTALL,
        ranks=ranks,
        # With these arguments, the job resumes; without a checkpoint, it starts from the beginning.
        program=shlex.join([plan.module, *plan.argv, "--resume"]),
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
    lines.append(f"packages=({shlex.join(plan.packages.lines if plan.packages else ())})")
    lines.append(f"train=({shlex.join(plan.argv)})")
    return _INSTALL_HEADER.format(stack=stack.name) + "\n".join([*lines, _read(INSTALL)])


def _read(name: str) -> str:
    return resources.files("jobs.places.script").joinpath(name).read_text()
