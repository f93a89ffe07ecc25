"""``spr-cluster iam-policy``."""

from __future__ import annotations

import argparse

from cluster.cli.parser import SubParsers, add_command
from infra.iam_policy import render_policy
from infra.s3 import parse_s3_url

_EXAMPLES = """\
  spr-cluster iam-policy > policy.json
  aws iam create-policy --policy-name spr-cluster --policy-document file://policy.json
  spr-cluster iam-policy --push-to s3://my-models/squad
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "iam-policy",
        "Print, as JSON, the least IAM policy that this tool requires. Actions that change or delete\n"
        "resources are limited to resources with this tool's tag.",
        _EXAMPLES,
    )
    parser.add_argument(
        "--push-to",
        metavar="s3://BUCKET/PREFIX",
        help="also allow `train` and `fetch` to store models there",
    )
    parser.add_argument(
        "--second-guard", action="store_true", help="also allow what `up --second-guard` makes"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    push_to = parse_s3_url(args.push_to) if args.push_to else None
    print(render_policy(push_to, second_guard=args.second_guard))
    return 0
