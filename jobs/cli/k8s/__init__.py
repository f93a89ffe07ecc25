"""``spr-cluster k8s``: one subcommand for each action."""

from __future__ import annotations

from cluster.cli.parser import SubParsers, add_command
from jobs.cli.k8s import submit

_EXAMPLES = """\
  spr-cluster render k8s squad --nodes 4 --image ghcr.io/me/spr:1 --output build
  spr-cluster k8s submit squad --nodes 4 --image ghcr.io/me/spr:1
  spr-cluster jobs --namespace ml
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "k8s",
        "Train on Kubernetes, with Kubeflow: the same jobs, stacks, and placement as on a cluster "
        "of your own. `jobs`, `attach`, `logs`, `wait`, `cancel`, `fetch`, and `report` take its ID as "
        "that of any other job.",
        _EXAMPLES,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    submit.add_parser(actions)
