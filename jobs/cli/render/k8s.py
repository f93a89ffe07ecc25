"""``spr-cluster render k8s``."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path

from cluster.cli.parser import SubParsers, add_command, add_json_option
from jobs.cli.k8s.requests import add_tasks, build_rendered
from jobs.cli.output_folder import check_output_folder, write_files
from jobs.launchers.kubernetes.job_files import Rendered

_OURS = ("Dockerfile", "requirements.txt", "job.yaml", "code")
_EXAMPLES = """\
  spr-cluster render k8s squad --nodes 4 --image ghcr.io/me/spr:1 --output build
  spr-cluster render k8s squad --demo --nodes 2 | kubectl create -f -
  spr-cluster render k8s squad --kind PyTorchJob --nodes 4 --claim my-data
  spr-cluster render k8s squad --recipe reference --nodes 4     the documentation's own job
  spr-cluster render k8s squad --cores 64 --numa 2 --memory 1024 --nodes 2
"""


def add_parser(schedulers: SubParsers) -> None:
    parser = add_command(
        schedulers,
        "k8s",
        "Write what a training job on Kubernetes consists of: Dockerfile, claim, and job. "
        "`k8s submit` creates it.",
        _EXAMPLES,
        help_="Dockerfile and YAML for Kubernetes",
    )
    tasks = add_tasks(
        parser,
        "Render the job that `train {task}` runs on a cluster of your own. Without --output, print the "
        "YAML; with it, write that and the folder from which the image is built.",
        _EXAMPLES,
    )
    text = "write the YAML and the image's build folder here"
    for task in tasks:
        task.add_argument("--output", metavar="DIR", help=text)
        add_json_option(task, "manifests and placement")
        task.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    # A training option has this name, too: the folder in the pods, which the request decides.
    output = vars(args).pop("output")
    rendered = build_rendered(args, datetime.now(timezone.utc))
    for warning in rendered.placement.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    folder = check_output_folder(output, _OURS, "render k8s") if output else None
    if folder:
        _write(rendered, folder)
    if args.json:
        print(json.dumps(_describe(rendered, folder)))
    elif folder:
        print(_next_steps(rendered, folder))
    else:
        print("---\n".join(rendered.yaml_files().values()), end="")
    return 0


def _write(rendered: Rendered, folder: Path) -> None:
    # It may be an earlier rendering's.
    (folder / "claim.yaml").unlink(missing_ok=True)
    yaml = {name: text.encode() for name, text in rendered.yaml_files().items()}
    write_files({**rendered.build, **yaml}, folder)


def _describe(rendered: Rendered, folder: Path | None) -> dict[str, object]:
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


def _next_steps(rendered: Rendered, folder: Path) -> str:
    image, name = shlex.quote(rendered.pods.image), shlex.quote(str(folder))
    files = " ".join(f"-f {shlex.quote(str(folder / each))}" for each in rendered.yaml_files())
    return (
        f"Dockerfile, code, and YAML of job {rendered.pods.name}: {folder}/\n\n"
        f"  docker build --tag {image} {name} && docker push {image}\n"
        f"  kubectl create {files}"
    )
