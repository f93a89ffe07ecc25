"""``spr-cluster render slurm``."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path

from cluster.cli.parser import SubParsers, add_command, add_json_option, positive_int
from jobs.cli.job_options import (
    add_shape_options,
    add_task_command,
    add_training_options,
    read_shape,
)
from jobs.cli.output_folder import check_output_folder, write_files
from jobs.cli.train_requests import read_options
from jobs.launchers.mpirun import warn_ignored
from jobs.launchers.plan import PlacementOptions, new_job_id
from jobs.launchers.script.script import OURS, SCRIPT, ScriptOptions, SlurmScript, render_slurm
from jobs.reference.presets import PRESETS
from jobs.train.elsewhere import plan_for_script
from jobs.train.request import TrainRequest, check_inputs
from jobs.worker.tasks import TASKS
from provision.stacks.load import DEFAULT_STACK, load_stack

_SHAPE = {"numa": "NUMA nodes of a node"}
_EXAMPLES = """\
  spr-cluster render slurm squad --nodes 4 --cores 64 --output job
  spr-cluster render slurm squad --nodes 4 --cores 96 --numa 2 --time 8:00:00 --output job
  spr-cluster render slurm squad --nodes 2 --demo --cores 8             print the script
  spr-cluster render slurm squad --nodes 2 --cores 64 --partition cpu --account bert --output job
"""


def add_parser(schedulers: SubParsers) -> None:
    slurm = add_command(
        schedulers, "slurm", "Write a Slurm job.", _EXAMPLES, help_="a Slurm batch script"
    )
    jobs = slurm.add_subparsers(title="jobs", metavar="JOB", required=True)
    for task in TASKS:
        _add_task(add_task_command(jobs, task, _ABOUT, _EXAMPLES), task)


_ABOUT = (
    "Write the job that `train {task}` runs on a cluster of your own as a Slurm batch script. Without "
    "--output, print the script; with it, write that, the installation of the stack, code, and data: "
    "a folder to copy to a file system that all nodes share."
)


def _add_task(parser: argparse.ArgumentParser, task: str) -> None:
    job = parser.add_argument_group("job")
    _add_job(job)
    parser.set_defaults(preset=None)
    if task == "squad":
        job.add_argument("--preset", choices=tuple(PRESETS), help="published model and settings")
    _add_slurm(parser.add_argument_group("Slurm"))
    parser.add_argument("--output", metavar="DIR", help="write the job's folder here")
    add_json_option(parser)
    add_training_options(parser, task)
    parser.set_defaults(run=run)


def _add_job(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--nodes", type=positive_int, required=True, metavar="N", help="number of nodes")
    # No machine is typical of centers, and ranks with another number of cores are slow.
    text = "physical cores of a node that jobs may use"
    add("--cores", type=positive_int, required=True, metavar="N", help=text)
    add_shape_options(group, _SHAPE)
    add("--ppn", type=positive_int, metavar="N", help="ranks per node (default: one per NUMA node)")
    text = "the nodes' network interface for the ranks, such as ib0"
    add("--interface", metavar="NAME", help=text)
    add("--stack", default=DEFAULT_STACK, help=f"software, see `stacks` (default: {DEFAULT_STACK})")
    add("--name", help="the job's name (default: TASK-DATE-TIME-…)")


def _add_slurm(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--partition", metavar="NAME", help="default: the cluster's")
    add("--account", metavar="NAME", help="default: yours")
    add(
        "--time",
        metavar="LIMIT",
        help="such as 90 (minutes), 8:00:00, or 2-12 (default: the partition's)",
    )
    add("--constraint", metavar="FEATURES", help="features that nodes must have, such as amx")


def run(args: argparse.Namespace) -> int:
    # A training option has this name, too: the folder of the ranks, which the job decides.
    output = vars(args).pop("output")
    script = build_script(args)
    folder = check_output_folder(output, OURS, "render slurm") if output else None
    if folder:
        write_files(script.files, folder)
        _warn_of_results(folder / "output")
    if args.json:
        print(json.dumps(_describe(script, folder)))
    else:
        print(_next_steps(script, folder) if folder else script.text, end="")
    return 0


def _warn_of_results(output: Path) -> None:
    if output.exists():
        print(
            f"warning: {output} is from an earlier job: this one would resume it or, if it is finished, "
            "not train; to start over, move it away",
            file=sys.stderr,
        )


def build_script(args: argparse.Namespace) -> SlurmScript:
    """Return the job that the options ask for. Raises :class:`UsageError` for options that don't fit."""
    options = ScriptOptions(
        name=args.name or new_job_id(args.task, datetime.now(timezone.utc)),
        nodes=args.nodes,
        shape=read_shape(args),
        partition=args.partition,
        account=args.account,
        time=args.time,
        constraint=args.constraint,
        interface=args.interface,
    )
    stack = load_stack(args.stack)
    placement = PlacementOptions(nproc_per_node=args.ppn)
    request = TrainRequest(read_options(args, args.preset), Path(), placement)
    check_inputs(request.options)
    script = render_slurm(plan_for_script(request, stack), options, stack)
    for warning in warn_ignored(stack, script.placement):
        print(f"warning: {warning}", file=sys.stderr)
    return script


def _describe(script: SlurmScript, folder: Path | None) -> dict[str, object]:
    return {
        "job": script.options.name,
        "output": str(folder) if folder else None,
        "nodes": script.options.nodes,
        "nproc_per_node": script.placement.nproc_per_node,
        "omp_threads": script.placement.omp_threads,
        "script": script.text,
    }


def _next_steps(script: SlurmScript, folder: Path) -> str:
    name = script.options.name
    return (
        f"Slurm job {name}: {folder}/\n\n"
        f"Copy the folder to a file system that all nodes share, and submit it there:\n\n"
        f"  rsync -a {shlex.quote(str(folder))}/ CENTER:{name}/\n"
        f"  cd {name} && bash install.sh     once, where the internet can be reached\n"
        f"  sbatch {SCRIPT}\n"
        "  squeue --me; tail -F log\n\n"
        "Model, metrics, and results.json are then in output/. Here:\n\n"
        "  mkdir -p results\n"
        f"  rsync -a --exclude checkpoints CENTER:{name}/output/ results/{name}/\n"
        f"  spr-cluster report results/{name}\n"
    )
