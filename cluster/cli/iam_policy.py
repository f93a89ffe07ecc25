"""``spr-cluster iam-policy``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from cluster.cli.chosen_cluster import add_cloud_options, open_cloud
from cluster.console.display import make_progress
from cluster.console.output import emit
from cluster.console.parser import SubParsers, add_command
from infra.aws.clients import connect
from infra.errors import SprError, UsageError
from infra.iam.dry_runs import judge
from infra.iam.policy import (
    build_policy,
    parse_key,
    parse_role,
    parse_types,
    render_policy,
    split_policy,
)
from infra.iam.simulation import Finding, State
from infra.s3_url import S3Location, check_prefixes, parse_s3_url
from infra.words import counted

_EXAMPLES = """\
  spr-cluster iam-policy > policy.json
  aws iam create-policy --policy-name spr-cluster \\
      --policy-document file://policy.json
  spr-cluster iam-policy --instance-type r7iz.metal-16xl,c7i.xlarge
  spr-cluster iam-policy --push-to s3://my-models/squad
  spr-cluster iam-policy --bucket s3://my-results/team
  spr-cluster iam-policy --check --instance-type r7iz.metal-16xl
"""
_LIMITS = {
    "simulation": "It cannot evaluate your organization's policies with conditions, nor the policies "
    "of keys and buckets.",
    "dry runs": "The permissions iam:SimulatePrincipalPolicy and iam:GetRole would allow IAM's "
    "simulator, which can check more.",
}


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "iam-policy",
        "Print the minimal IAM policy that this tool requires, as JSON. It allows buying only the types in\n"
        "--instance-type, and only machines and disks with this tool's tag. EC2 resources can be changed or\n"
        "deleted only if they have that tag.",
        _EXAMPLES,
        run=run,
    )
    parser.add_argument(
        "--instance-type",
        metavar="TYPES",
        help="types that can be bought, separated by commas (default: all types with AMX in the "
        "tool's table, and those that bake images)",
    )
    parser.add_argument(
        "--kms-key",
        metavar="ARN",
        help="also allow using this customer-managed key, if it is the account's default for EBS. For spot "
        "machines, EC2's role AWSServiceRoleForEC2Spot may also need a grant on it (aws kms create-grant)",
    )
    parser.add_argument(
        "--push-to",
        metavar="s3://BUCKET/PREFIX",
        help="also allow `train` and `fetch` to store models there",
    )
    parser.add_argument(
        "--second-guard",
        action="store_true",
        help="also allow what `up --second-guard` creates. This permits creating roles with any permissions, "
        "if their names begin with spr-cluster-; --permissions-boundary limits them",
    )
    parser.add_argument(
        "--bucket",
        metavar="s3://BUCKET/PREFIX",
        help="also allow what `up --bucket` creates, and reading the results there. This permits creating "
        "roles with any permissions, if their names begin with spr-cluster-; --permissions-boundary limits "
        "them",
    )
    parser.add_argument(
        "--bucket-kms-key",
        metavar="ARN",
        help="also allow reading results that are encrypted with this key, as for `up --bucket-kms-key`",
    )
    parser.add_argument(
        "--permissions-boundary",
        metavar="ARN",
        help="with --bucket or --second-guard: only roles with this permissions boundary can be created",
    )
    parser.add_argument(
        "--instance-profile",
        metavar="ROLE",
        help="also allow passing this role to EC2, for an `up --instance-profile` whose profile has it (aws "
        "iam get-instance-profile shows the role; put its path before the name: team/nodes)",
    )
    parser.add_argument(
        "--part",
        type=int,
        metavar="N",
        help="print only this part. IAM limits a policy to 6,144 characters, so many options make several "
        "parts: attach a policy for each",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="print which of the policy's permissions these AWS credentials are missing; creates nothing; "
        "the exit code is 1 if any are missing",
    )
    add_cloud_options(parser)


def run(args: argparse.Namespace) -> int:
    policy = build_policy(
        parse_s3_url(args.push_to) if args.push_to else None,
        parse_types(args.instance_type),
        parse_key(args.kms_key, "--kms-key"),
        second_guard=args.second_guard,
        bucket=_parse_bucket(args),
        bucket_kms_key=parse_key(args.bucket_kms_key, "--bucket-kms-key"),
        permissions_boundary=args.permissions_boundary,
        instance_role=parse_role(args.instance_profile),
    )
    if args.check:
        _check(args, policy)
    else:
        print(render_policy(_choose_part(split_policy(policy), args.part)))
    return 0


def _choose_part(parts: Sequence[dict[str, Any]], number: int | None) -> dict[str, Any]:
    if number is None and len(parts) > 1:
        raise UsageError(
            f"with these options, the policy exceeds IAM's limit of 6,144 characters: it has {len(parts)} "
            "parts",
            hint=f"add --part 1 to print the first, and so on to --part {len(parts)}; attach a policy for "
            "each",
        )
    if number is not None and not 1 <= number <= len(parts):
        raise UsageError(f"--part {number}: the policy has {counted(len(parts), 'part')}")
    return parts[(number or 1) - 1]


def _parse_bucket(args: argparse.Namespace) -> S3Location | None:
    if args.permissions_boundary and not (args.bucket or args.second_guard):
        raise UsageError(
            "--permissions-boundary: it is for the roles of --bucket and --second-guard"
        )
    return parse_s3_url(check_prefixes((args.bucket,), "--bucket")[0]) if args.bucket else None


def _check(args: argparse.Namespace, policy: dict[str, Any]) -> None:
    """Print the caller's missing permissions. Raises :class:`SprError` if there are any."""
    progress = make_progress()
    cloud = open_cloud(args.cloud or "aws", args.region, progress)
    clients = connect(cloud)
    caller = clients.caller.arn
    with progress.phase(f"Permissions of {caller} in {cloud.region}"):
        means, findings = judge(clients, policy)
    by_state = {state: [f for f in findings if f.state == state] for state in get_args(State)}
    shown = {
        state: [{"action": f.action, "why": f.why} for f in found]
        for state, found in by_state.items()
    }
    place = {"caller": caller, "region": cloud.region, "means": means}
    emit(args, "\n".join(_render(means, by_state)), {**place, **shown})
    if missing := by_state["missing"]:
        raise SprError(
            f"{counted(len(missing), 'permission')} missing",
            hint="ask an administrator to allow what is missing (the same command without --check prints "
            "the full policy), or choose another AWS_PROFILE",
        )


def _render(means: str, by_state: Mapping[State, Sequence[Finding]]) -> Iterator[str]:
    for finding in by_state["missing"]:
        yield f"missing: {finding.action}: {finding.why}"
    for why in dict.fromkeys(finding.why for finding in by_state["unknown"]):
        actions = ", ".join(f.action for f in by_state["unknown"] if f.why == why)
        yield f"not checked, {why}: {actions}"
    titles = {state: "not checked" if state == "unknown" else state for state in by_state}
    counts = ", ".join(f"{len(by_state[state])} {title}" for state, title in titles.items())
    yield f"By {means}: {counts}. {_LIMITS[means]}"
