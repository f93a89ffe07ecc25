"""``spr-cluster iam-policy``."""

from __future__ import annotations

import argparse

from cluster.cli.common import SubParsers, add_command

_EXAMPLES = """\
  spr-cluster iam-policy > policy.json
  aws iam create-policy --policy-name spr-cluster --policy-document file://policy.json
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "iam-policy",
        "print the least IAM policy that this tool needs",
        "Print, as JSON, the IAM policy that lets somebody do all that this tool does, and no more.\n"
        "What changes things or takes them away works only on what carries this tool's tag.",
        _EXAMPLES,
    )
    parser.set_defaults(run=run)


def run(_: argparse.Namespace) -> int:
    from infra.policy import render_policy

    print(render_policy())
    return 0
