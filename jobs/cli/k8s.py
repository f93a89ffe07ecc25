"""``spr-cluster k8s``: one subcommand for each action."""

from __future__ import annotations

from cluster.cli.parser import SubParsers, add_command
from jobs.cli import k8s_delete, k8s_fetch, k8s_logs, k8s_render, k8s_status, k8s_submit

_EXAMPLES = """\
  spr-cluster k8s render squad --nodes 4 --image ghcr.io/me/spr:1 --output build
  spr-cluster k8s submit squad --nodes 4 --image ghcr.io/me/spr:1
  spr-cluster k8s status
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
    for each in (k8s_render, k8s_submit, k8s_status, k8s_logs, k8s_fetch, k8s_delete):
        each.add_parser(actions)
