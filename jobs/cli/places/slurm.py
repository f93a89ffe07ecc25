"""A training job as a batch script and a folder for another Slurm cluster."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from cluster.console.output import say
from infra.errors import UsageError
from infra.words import counted
from jobs.cli.places.folder import Result, check_output_folder, write_files
from jobs.cli.places.options import SLURM, PlaceRequest
from jobs.places.environment import warn_ignored
from jobs.places.plan import JobPlan
from jobs.places.script.script import OURS, SCRIPT, ScriptOptions, SlurmScript, render_slurm
from jobs.worker.runtime.output import LOGS, METRICS, state_folder
from provision.stacks.stack import Stack

LOGIN = "before sbatch, run `export {key}=…`"
"""What a user does for a variable with a login."""


def read_script(request: PlaceRequest, nodes: int | None, name: str) -> ScriptOptions:
    """Return the script's options. Raises :class:`UsageError` if one is missing."""
    # No machine is typical of centers, and ranks with another number of cores are slow.
    if nodes is None:
        raise UsageError(f"--to {SLURM} needs --nodes, the number of nodes")
    shape = request.find_shape()
    if shape is None:
        raise UsageError(
            f"--to {SLURM} needs --shape cores=N, the physical cores per node that jobs may use, or "
            "--instance-type"
        )
    if request.shape and re.search("threads|memory", request.shape):
        raise UsageError(
            f"--shape {request.shape}: threads and memory have no effect with --to {SLURM}",
            hint="give only cores and numa",
        )
    return ScriptOptions(name=name, nodes=nodes, shape=shape)


def render(plan: JobPlan, options: ScriptOptions, stack: Stack) -> SlurmScript:
    """Return the job's script, and warn of what it ignores."""
    script = render_slurm(plan, options, stack)
    for warning in warn_ignored(stack, script.placement):
        say(f"warning: {warning}")
    return script


def write(script: SlurmScript, output: str | None) -> Result:
    """Write a job's folder; without one, return its script."""
    if output is None:
        return script.text.rstrip("\n"), describe(script)
    folder = check_output_folder(output, OURS, SLURM)
    write_files(script.files, folder)
    _warn_of_results(folder)
    return _how_to_submit(script, folder), describe(script, folder)


def _warn_of_results(folder: Path) -> None:
    output = folder / "output"
    if output.exists() or state_folder(output).exists():
        say(
            f"warning: {folder} has results of an earlier job: this one would resume it or, if it is "
            "finished, not train; to start over, move output/ and output.state/ away"
        )


def summarize(script: SlurmScript) -> str:
    """Return the job in a line: its nodes and their ranks."""
    placement, nodes = script.placement, script.options.nodes
    ranks = counted(placement.nproc_per_node, "rank")
    threads = counted(placement.omp_threads, "thread")
    return f"job {script.options.name}: {counted(nodes, 'node')}, each with {ranks} of {threads}"


def describe(script: SlurmScript, folder: Path | None = None) -> dict[str, object]:
    """Return the job for ``--json``."""
    return {
        "job": script.options.name,
        "output": str(folder) if folder else None,
        "nodes": script.options.nodes,
        "nproc_per_node": script.placement.nproc_per_node,
        "omp_threads": script.placement.omp_threads,
        "script": script.text,
    }


def _how_to_submit(script: SlurmScript, folder: Path) -> str:
    name = script.options.name
    own = " ".join(f"CENTER:{name}/output.state/{each}" for each in (METRICS, LOGS))
    return (
        f"Slurm job {name}: {folder}/\n\n"
        f"Copy the folder to a file system that all nodes share, and submit it there:\n\n"
        f"  rsync -a {shlex.quote(str(folder))}/ CENTER:{name}/\n"
        f"  cd {name} && bash install.sh     once, where the internet can be reached\n"
        f"  sbatch {SCRIPT}\n"
        "  squeue --me; tail -F log\n\n"
        "Model and results.json are then in output/, metrics in output.state/. Here:\n\n"
        f"  mkdir -p results/{name}/job\n"
        f"  rsync -a CENTER:{name}/output/ results/{name}/\n"
        f"  rsync -a {own} results/{name}/job/\n"
        f"  spr-cluster report results/{name}"
    )
