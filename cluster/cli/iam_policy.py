"""``spr-cluster iam-policy``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from cluster.cli.chosen_cluster import CloudRequest, open_cloud
from cluster.console.display import make_progress
from cluster.console.options import option, switch
from cluster.console.output import emit
from cluster.console.parser import Parser, add_request
from infra.aws.clients import connect
from infra.errors import SprError, UsageError
from infra.iam.dry_runs import judge
from infra.iam.policy import (
    build_policy,
    parse_key,
    parse_role,
    parse_types,
    split_policy,
)
from infra.iam.simulation import Finding, State
from infra.s3_url import S3Location, check_prefixes, parse_s3_url
from infra.spec import EICE, SSM
from infra.words import counted

_PREFIX = "s3://BUCKET/PREFIX"
_LIMITS = {
    "simulation": "It cannot evaluate your organization's policies with conditions, nor the policies "
    "of keys and buckets.",
    "dry runs": "The permissions iam:SimulatePrincipalPolicy and iam:GetRole would allow IAM's "
    "simulator, which can check more.",
}


@dataclass(frozen=True, kw_only=True)
class PolicyRequest(CloudRequest):
    """Print the minimal IAM policy that this tool requires, as JSON. It allows buying only the types in
    --instance-type, and only machines and disks with this tool's tag; only EC2 resources with that
    tag can be changed or deleted. Each of --bucket, --read-from, and --second-guard permits creating roles
    with any permissions, if their names begin with spr-cluster-; --permissions-boundary limits them.

    examples:
      spr-cluster iam-policy > policy.json
      aws iam create-policy --policy-name spr-cluster \\
          --policy-document file://policy.json
      spr-cluster iam-policy --instance-type r7iz.metal-16xl,c7i.xlarge
      spr-cluster iam-policy --check --instance-type r7iz.metal-16xl
    """

    instance_type: str | None = option(
        "types that can be bought: a,b,c (default: all bare-metal types with AMX, and a few virtual sizes)",
        metavar="TYPES",
    )
    kms_key: str | None = option(
        "also allow this customer-managed key, if it is the account's default for EBS. For spot machines, "
        "the role AWSServiceRoleForEC2Spot may also need a grant (aws kms create-grant)",
        metavar="ARN",
    )
    push_to: str | None = option(
        "also allow `train` and `fetch` to store models there", metavar=_PREFIX
    )
    second_guard: bool = switch("also allow what `up --second-guard` creates")
    bucket: str | None = option(
        "also allow what `up --bucket` creates, and reading the results there", metavar=_PREFIX
    )
    read_from: bool = switch("also allow what `up --read-from` creates")
    bucket_kms_key: str | None = option(
        "also allow reading results that are encrypted with this key", metavar="ARN"
    )
    permissions_boundary: str | None = option(
        "with --bucket, --read-from, or --second-guard: only roles with this permissions boundary can be "
        "created",
        metavar="ARN",
    )
    instance_profile: str | None = option(
        "also allow passing this role to EC2, for an `up --instance-profile` whose profile has it; with its "
        "path: team/nodes",
        metavar="ROLE",
    )
    jump: str | None = option(
        "also allow connecting to the machines this way, for `up --jump`", choices=(EICE, SSM)
    )
    part: int | None = option(
        "print only this part, for options that exceed IAM's limit of 6,144 characters",
        parse=int,
        metavar="N",
        excludes="way",
    )
    check: bool = switch(
        "print which of these permissions your AWS credentials are missing; the exit code is 1 if any are",
        excludes="way",
    )


def add_parser(parent: Parser) -> None:
    add_request(parent, "iam-policy", run, PolicyRequest)


def run(request: PolicyRequest) -> int:
    policy = build_policy(
        parse_s3_url(request.push_to) if request.push_to else None,
        parse_types(request.instance_type),
        parse_key(request.kms_key, "--kms-key"),
        second_guard=request.second_guard,
        bucket=_parse_bucket(request),
        read_from=request.read_from,
        bucket_kms_key=parse_key(request.bucket_kms_key, "--bucket-kms-key"),
        permissions_boundary=request.permissions_boundary,
        instance_role=parse_role(request.instance_profile),
        jump=request.jump,
    )
    if request.check:
        _check(request, policy)
    else:
        print(json.dumps(_choose_part(split_policy(policy), request.part), indent=2))
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


def _parse_bucket(request: PolicyRequest) -> S3Location | None:
    makes_roles = request.bucket or request.read_from or request.second_guard
    if request.permissions_boundary and not makes_roles:
        raise UsageError(
            "--permissions-boundary: it is for the roles of --bucket, --read-from, and --second-guard"
        )
    bucket = request.bucket
    return parse_s3_url(check_prefixes((bucket,), "--bucket")[0]) if bucket else None


def _check(request: CloudRequest, policy: dict[str, Any]) -> None:
    """Print the caller's missing permissions. Raises :class:`SprError` if there are any."""
    progress = make_progress()
    cloud = open_cloud(request.cloud or "aws", request.region, progress)
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
    emit(request, "\n".join(_render(means, by_state)), {**place, **shown})
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
