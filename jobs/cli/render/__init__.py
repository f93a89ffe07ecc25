"""``spr-cluster render``: a training job as files for a cluster that this tool has not made."""

from __future__ import annotations

from cluster.cli.parser import SubParsers, add_command
from jobs.cli.render import k8s, slurm

_EXAMPLES = """\
  spr-cluster render k8s squad --nodes 4 --image ghcr.io/me/spr:1 --output build
  spr-cluster render slurm squad --nodes 4 --cores 64 --output job
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "render",
        "Write a training job as files for a cluster that is not yours: Kubernetes, or the Slurm of an "
        "HPC center. It asks no cluster.",
        _EXAMPLES,
    )
    schedulers = parser.add_subparsers(title="schedulers", metavar="SCHEDULER", required=True)
    for each in (k8s, slurm):
        each.add_parser(schedulers)
