"""``spr-cluster k8s``: one subcommand for each action."""

from __future__ import annotations

from cluster.cli.parser import SubParsers, add_command
from jobs.cli import k8s_render

_EXAMPLES = """\
  spr-cluster k8s render squad --nodes 4 --output build   Dockerfile, claim, and job
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "k8s",
        "Train on Kubernetes, with Kubeflow: the same jobs, stacks, and placement as on a cluster "
        "of your own.",
        _EXAMPLES,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    k8s_render.add_parser(actions)
