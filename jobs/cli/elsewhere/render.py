"""``spr-cluster render``: a training job as files for another cluster."""

from __future__ import annotations

from jobs.worker.spec import PlacementOptions

import argparse
import shlex
import shutil
from collections.abc import Collection, Mapping
from datetime import datetime, timezone
from pathlib import Path

from cluster.console.output import emit, say
from cluster.console.parser import Parser, SubParsers, add_command, add_json_option, positive_int
from infra.errors import UsageError
from jobs.cli.elsewhere.pod_options import add_pod_options, build_rendered
from jobs.cli.shared.job_options import (
    add_shape_options,
    add_tasks,
    add_training_options,
    read_options,
    read_shape,
)
from jobs.launchers.kubernetes.manifests import Rendered
from jobs.launchers.mpirun import warn_ignored
from jobs.launchers.plan import new_job_id
from jobs.launchers.script.script import OURS, SCRIPT, ScriptOptions, SlurmScript, render_slurm
from jobs.reference.plan import PRESETS
from jobs.train.elsewhere import plan_for_script
from jobs.train.request import TrainRequest, check_inputs, check_writable, expand_home
from provision.stacks.load import DEFAULT_STACK, load_stack

_EXAMPLES = """\
  spr-cluster render k8s squad --nodes 4 --output build
  spr-cluster render slurm squad --nodes 4 --cores 64 --output job
"""
_K8S_FILES = ("Dockerfile", "requirements.txt", "job.yaml", "code")
_K8S_EXAMPLES = """\
  spr-cluster render k8s squad --nodes 4 --image me/spr:1 --output build
  spr-cluster render k8s squad --demo --nodes 2 | kubectl create -f -
  spr-cluster render k8s squad --kind PyTorchJob --nodes 4 --claim my-data
  spr-cluster render k8s squad --recipe reference --nodes 4  the published job
  spr-cluster render k8s squad --cores 64 --numa 2 --memory 1024 --nodes 2
"""
_SHAPE = {"numa": "NUMA nodes per node"}
_SLURM_EXAMPLES = """\
  spr-cluster render slurm squad --nodes 4 --cores 64 --output job
  spr-cluster render slurm squad --nodes 4 --cores 96 --numa 2 --time 8:00:00
  spr-cluster render slurm squad --nodes 2 --cores 8 --demo   print the script
  spr-cluster render slurm squad --nodes 2 --cores 64 --account me
"""
_ABOUT_SLURM = (
    "Write the job that `train {task}` runs on a cluster of your own as a Slurm batch script. Without "
    "--output, print the script; with it, write that, the installation of the stack, code, and data: "
    "a folder to copy to a file system that all nodes share."
)


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "render",
        "Write a training job as files for a cluster that this tool has not created: Kubernetes, or "
        "Slurm at an HPC center. It contacts no cluster.",
        _EXAMPLES,
    )
    schedulers = parser.add_subparsers(title="schedulers", metavar="SCHEDULER", required=True)
    _add_k8s(schedulers)
    slurm = add_command(
        schedulers, "slurm", "Write a Slurm job.", _SLURM_EXAMPLES, "a Slurm batch script"
    )
    for task, each in add_tasks(slurm, _ABOUT_SLURM, _SLURM_EXAMPLES, run_slurm):
        _add_slurm_task(each, task)


def _add_k8s(schedulers: SubParsers) -> None:
    k8s = add_command(
        schedulers,
        "k8s",
        "Write what a training job on Kubernetes consists of: Dockerfile, claim, and job. "
        "`k8s submit` creates it.",
        _K8S_EXAMPLES,
        "Dockerfile and YAML for Kubernetes",
    )
    about = (
        "Render the job that `train {task}` runs on a cluster of your own. Without --output, print the "
        "YAML; with it, write that and the folder from which the image is built."
    )
    for task, each in add_tasks(k8s, about, _K8S_EXAMPLES, run_k8s):
        add_pod_options(each, task)
        text = "write the YAML and the image's build folder here"
        each.add_argument("--output", metavar="DIR", help=text)
        add_json_option(each, "manifests and placement")


def run_k8s(args: argparse.Namespace) -> int:
    # A training option has the same name: the folder in the pods, which the request decides.
    output = vars(args).pop("output")
    rendered = build_rendered(args, datetime.now(timezone.utc))
    for warning in rendered.placement.warnings:
        say(f"warning: {warning}")
    folder = check_output_folder(output, _K8S_FILES, "render k8s") if output else None
    if folder:
        _write(rendered, folder)
    text = "---\n".join(rendered.yaml_files().values()).rstrip("\n")
    emit(
        args,
        _how_to_create(rendered, folder) if folder else text,
        _describe_rendered(rendered, folder),
    )
    return 0


def _write(rendered: Rendered, folder: Path) -> None:
    # It may be left from an earlier rendering.
    (folder / "claim.yaml").unlink(missing_ok=True)
    yaml = {name: text.encode() for name, text in rendered.yaml_files().items()}
    write_files({**rendered.build, **yaml}, folder)


def _describe_rendered(rendered: Rendered, folder: Path | None) -> dict[str, object]:
    placement, size = rendered.placement, rendered.size
    return {
        "job": rendered.pods.name,
        "output": str(folder) if folder else None,
        "nodes": rendered.pods.nodes,
        "nproc_per_node": placement.nproc_per_node,
        "omp_threads": placement.omp_threads,
        "ccl_workers": placement.ccl_workers,
        "cpus": size.cpus,
        "memory_gib": size.memory_gib,
        "manifests": rendered.manifests,
        "dockerfile": rendered.dockerfile,
    }


def _how_to_create(rendered: Rendered, folder: Path) -> str:
    image, name = shlex.quote(rendered.pods.image), shlex.quote(str(folder))
    files = " ".join(f"-f {shlex.quote(str(folder / each))}" for each in rendered.yaml_files())
    return (
        f"Dockerfile, code, and YAML of job {rendered.pods.name}: {folder}/\n\n"
        f"  docker build --tag {image} {name} && docker push {image}\n"
        f"  kubectl create {files}"
    )


def _add_slurm_task(parser: Parser, task: str) -> None:
    job = parser.add_argument_group("job")
    _add_job(job)
    parser.set_defaults(preset=None)
    if task == "squad":
        job.add_argument("--preset", choices=tuple(PRESETS), help="published model and settings")
    _add_slurm(parser.add_argument_group("Slurm"))
    parser.add_argument("--output", metavar="DIR", help="write the job's folder here")
    add_json_option(parser)
    add_training_options(parser, task)


def _add_job(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--nodes", type=positive_int, required=True, metavar="N", help="number of nodes")
    # No machine is typical of centers, and ranks with another number of cores are slow.
    text = "physical cores per node that jobs may use"
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


def run_slurm(args: argparse.Namespace) -> int:
    # A training option has the same name: the folder of the ranks, which the job decides.
    output = vars(args).pop("output")
    script = build_script(args)
    folder = check_output_folder(output, OURS, "render slurm") if output else None
    if folder:
        write_files(script.files, folder)
        _warn_of_results(folder / "output")
    text = _how_to_submit(script, folder) if folder else script.text.rstrip("\n")
    emit(args, text, _describe_script(script, folder))
    return 0


def _warn_of_results(output: Path) -> None:
    if output.exists():
        say(
            f"warning: {output} is from an earlier job: this one would resume it or, if it is finished, "
            "not train; to start over, move it away"
        )


def build_script(args: argparse.Namespace) -> SlurmScript:
    """Return the job for the options. Raises :class:`UsageError` for options that don't fit together."""
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
        say(f"warning: {warning}")
    return script


def _describe_script(script: SlurmScript, folder: Path | None) -> dict[str, object]:
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
        f"  spr-cluster report results/{name}"
    )


def check_output_folder(name: str, ours: Collection[str], writer: str) -> Path:
    """Return the folder. Raises :class:`UsageError` if it can't be written, or holds other files.

    A folder that contains ``ours`` was written by the command ``writer``.
    """
    folder = expand_home(name)
    check_writable(folder, "--output")
    found = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if found and not set(ours) <= found:
        raise UsageError(
            f"--output {folder}: it contains other files",
            hint=f"give a folder that is new, or that `{writer}` wrote",
        )
    return folder


def write_files(files: Mapping[str, Path | bytes], folder: Path) -> None:
    """Write contents, and copies of files and folders, by name into a folder; ``code`` is recreated.

    Before anything changes, raises :class:`UsageError` for a folder that would be copied into itself and
    for a source that would be replaced.
    """
    for name, source in files.items():
        if isinstance(source, Path):
            _check_source(source, folder, folder / name)
    shutil.rmtree(folder / "code", ignore_errors=True)
    for name, source in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(source, bytes):
            target.write_bytes(source)
        elif not (target.exists() and source.samefile(target)):
            _copy(source, target)


def _check_source(source: Path, folder: Path, target: Path) -> None:
    where, whole = source.resolve(), folder.resolve()
    if whole.is_relative_to(where):
        raise UsageError(f"--output {folder}: it is in {source}, which is copied into it")
    if where.is_relative_to(whole) and where != target.resolve():
        raise UsageError(
            f"--output {folder}: {source} is in it, and what is in it is replaced",
            hint="give another folder, or move that file or folder out of it first",
        )


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)
