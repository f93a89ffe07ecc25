"""Checks of an account before the first purchase: would `up` with these options succeed?

They create and change nothing, run in parallel, and fail independently.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from cluster.context import Context
from cluster.lifecycle.machines import Machines
from cluster.lifecycle.prepare import find_reservations, prepare
from cluster.verify.results import CLUSTER, CheckResult, Verdict, name_some
from infra.aws.clients import DENIED, error_code, translate_boto_error, unless
from infra.cost.quotas import (
    count_in_market,
    describe_quota,
    quota_code,
    require_quota,
)
from infra.ec2 import key_pair, network, tags
from infra.ec2.cluster_record import new_record, record_tags
from infra.ec2.images import Image, find_ubuntu_image
from infra.ec2.instances import HEAD, WORKER
from infra.ec2.inventory import describe_inventory
from infra.ec2.network import Network, TypeSupport
from infra.ec2.network_acls import install_flows, require_open_acls, ssh_flows
from infra.ec2.purchase import Offer, list_offers, render_request
from infra.ec2.routes import require_jump, require_s3, require_ways
from infra.errors import SprError
from infra.iam.bucket_access import check_buckets
from infra.iam.dry_runs import (
    describe_tag_rules,
    find_tag_conflicts,
    is_about_default_group,
    judge,
    only_existing,
)
from infra.iam.policy import CONNECTIONS, OPTIONAL, build_policy
from infra.iam.simulation import Finding
from infra.instance_types import find_machine, is_standard
from infra.plan.actions import ActionKind
from infra.plan.ownership import split_groups
from infra.plan.planner import plan_up, rank_instances
from infra.s3_url import parse_s3_url
from infra.spec import AUTO, EICE, SSM, ClusterChange, ClusterSpec, parse_ssh_cidr
from infra.wait import start_thread
from infra.words import counted
from provision.jump import require_way
from provision.stacks.load import load_stack

# If the network drops packets, the SDK alone would try for minutes.
_DEADLINE_S = 60.0
# A documentation address: the request does not say who may use SSH, so none is looked up.
NOBODY = "192.0.2.1/32"
# boto3 can create clients in one thread only:
# https://boto3.amazonaws.com/v1/documentation/api/latest/guide/clients.html
_CLIENTS = ["ec2", "dry", "ssm", "quotas", "iam", "sts", "pricing", "scheduler", "organizations"]
_ROLES = {
    ActionKind.RUN_HEAD: HEAD,
    ActionKind.RUN_NODES: WORKER,
    ActionKind.RUN_WORKERS: WORKER,
}
# Everyone who may use EBS may use the key that AWS manages for it.
_MANAGED_KEY = "alias/aws/ebs"
_ACTION = re.compile(r"[\w-]+:\w+(?= on )")


@dataclass(frozen=True)
class Examination:
    """An account, and the cluster that `up` would create there."""

    ctx: Context
    spec: ClusterSpec
    change: ClusterChange
    ssh_cidr: str | None

    @cached_property
    def support(self) -> dict[str, TypeSupport]:
        return network.describe_type_support(self.ctx.clients.ec2, self.spec.instance_types)

    @cached_property
    def networks(self) -> list[Network]:
        """The subnets in zones that offer a type."""
        spec, ec2 = self.spec, self.ctx.clients.ec2
        found = network.describe_networks(ec2, spec.subnet_ids, None)
        network.require_offers(spec, self.support, found, self.ctx.cloud.region)
        return [each for each in found if each.zone in self.zones]

    @cached_property
    def zones(self) -> list[str]:
        return sorted({zone for known in self.support.values() for zone in known.zones})

    @cached_property
    def caller(self) -> str:
        """This machine's address as AWS sees it; "" if other addresses may use SSH."""
        words = parse_ssh_cidr(self.ssh_cidr) if self.ssh_cidr else (AUTO,)
        inside = self.spec.private or self.spec.jump
        return "" if inside or AUTO not in words else self.ctx.cloud.caller_cidr()

    @cached_property
    def image(self) -> Image:
        clients = self.ctx.clients
        return find_ubuntu_image(clients.ssm, clients.ec2, load_stack(self.spec.stack).ubuntu)


Look = Callable[[Examination], Iterable[CheckResult]]
Futures = Mapping[str, "Future[list[CheckResult]]"]


@dataclass(frozen=True)
class Check:
    """A check of the account, skipped if one that it ``needs`` has failed."""

    name: str
    look: Look
    needs: Sequence[str] = ("account",)


def examine(exam: Examination) -> list[CheckResult]:
    """Run all checks, in at most a minute."""
    for name in _CLIENTS:
        getattr(exam.ctx.clients, name)
    futures: dict[str, Future[list[CheckResult]]] = {}
    for check in CHECKS:  # each needs only earlier ones
        futures[check.name] = start_thread(partial(_look, exam, check, futures))
    deadline = time.monotonic() + _DEADLINE_S
    return [result for check in CHECKS for result in _await(check, futures, deadline)]


def _await(check: Check, futures: Futures, deadline: float) -> Sequence[CheckResult]:
    try:
        return futures[check.name].result(max(0.0, deadline - time.monotonic()))
    except FutureTimeoutError:
        if silent := [name for name in check.needs if not futures[name].done()]:
            return _skipped(check.name, f"not checked: needs {silent[0]}")
        found, remedy = f"no answer within {_DEADLINE_S:.0f} s", "Check the network to AWS."
        return [_result(check.name, Verdict.FAIL, found, remedy)]


def _look(exam: Examination, check: Check, futures: Futures) -> list[CheckResult]:
    for name in check.needs:
        if not all(r.verdict in (Verdict.OK, Verdict.WARN) for r in futures[name].result()):
            return _skipped(check.name, f"not checked: needs {name}")
    try:
        return list(check.look(exam))
    except (SprError, ClientError, BotoCoreError) as error:
        failure = translate_boto_error(error)
        assert failure, "botocore's errors have a translation"
        return [_result(check.name, Verdict.FAIL, failure.message, failure.hint or "")]


def _result(
    name: str, verdict: Verdict, found: str, remedy: str = "", place: str = CLUSTER
) -> CheckResult:
    return CheckResult(place, name, verdict, found, remedy=remedy)


def _ok(name: str, found: str) -> list[CheckResult]:
    return [_result(name, Verdict.OK, found)]


def _skipped(name: str, found: str) -> list[CheckResult]:
    return [_result(name, Verdict.SKIPPED, found)]


def _account(exam: Examination) -> list[CheckResult]:
    caller = exam.ctx.clients.caller
    return _ok("account", f"{caller.account}, {caller.arn.rpartition(':')[2]}")


def _region(exam: Examination) -> list[CheckResult]:
    ctx, names = exam.ctx, exam.spec.instance_types
    network.require_known(ctx.clients.ec2, names, exam.support)
    network.require_sold(exam.spec, exam.support, ctx.cloud.region)
    zones = ", ".join(zone.removeprefix(ctx.cloud.region) for zone in exam.zones)
    return _ok("region", f"{', '.join(exam.support)} in {ctx.cloud.region}, zones {zones}")


def _quota(exam: Examination) -> list[CheckResult]:
    spec, clients = exam.spec, exam.ctx.clients
    if not is_standard(spec.instance_types):
        return _skipped("quota", f"{', '.join(spec.instance_types)}: AWS counts them separately")
    machines = [find_machine(clients.ec2, name) for name in spec.instance_types]
    there = describe_inventory(clients.ec2, spec.name, ("instances",)).alive
    key = key_pair.fingerprint(key_pair.read_public(exam.ctx.files.key))
    own = [m for m in there if m.tags.get(tags.OWNER_KEY) == key and not m.is_stopped]
    nodes = count_in_market(spec, rank_instances(own)[: spec.nodes])
    needs = {m.name: m.vcpus * nodes for m in machines if m}
    reasons: list[str] = []
    held = describe_quota(clients.quotas, spot=spec.spot, why_not=reasons.append)
    require_quota(spec, nodes, needs, held)
    code, most = quota_code(spot=spec.spot), max(needs.values(), default=0)
    if held is None:
        return _skipped("quota", f"{code} needs {most} vCPUs; it is unknown: {reasons[0]}")
    return _ok("quota", f"{code} needs {most} vCPUs of {held}")


def _network(exam: Examination) -> list[CheckResult]:
    if exam.spec.subnet_ids:
        found = (f"{each.subnet_id} in {each.zone}" for each in exam.networks)
        return _ok("network", ", ".join(found))
    return _ok("network", f"a default subnet in {len(exam.networks)} of these zones")


def _routes(exam: Examination) -> list[CheckResult]:
    notes: list[str] = []
    clients, private, proxy = exam.ctx.clients, exam.spec.private, exam.spec.proxy
    left = require_ways(clients, exam.networks, notes.append, exam.spec, installs=not proxy)
    if exam.ctx.cloud.billed:
        left = require_s3(clients, left, notes.append, exam.spec)
    if notes:
        return [_result("routes", Verdict.WARN, " ".join(notes))]
    if private and proxy:
        return _skipped("routes", f"software comes through {proxy}; whether it answers is unknown")
    way = "reaches the internet" if private else "can be reached over the internet"
    return _ok("routes", f"a machine {way} in {counted(len(left), 'subnet')}")


def _acls(exam: Examination) -> list[CheckResult]:
    notes: list[str] = []
    try:
        flows = ssh_flows(exam.caller) if exam.caller else ()
    except SprError:
        flows = ()  # the address check reports why
    flows += install_flows() if not exam.spec.proxy else ()
    left = require_open_acls(exam.ctx.clients.ec2, exam.networks, flows, notes.append)
    if notes:
        return [_result("network ACLs", Verdict.WARN, " ".join(notes))]
    what = "SSH and downloads pass" if not exam.spec.proxy else "SSH passes"
    return _ok("network ACLs", f"{what} in {counted(len(left), 'subnet')}")


def _port_22(exam: Examination) -> list[CheckResult]:
    if exam.spec.private or exam.spec.jump:
        return _skipped("port 22", "machines are reached another way")
    if blocked := exam.ctx.cloud.probe_ssh():
        remedy = (
            "Use a network that allows outgoing SSH, or have an administrator allow it to the region's "
            "machines. With --jump, SSH takes another route."
        )
        return [_result("port 22", Verdict.FAIL, f"this network blocks it: {blocked}", remedy)]
    return _ok("port 22", "this network allows outgoing SSH")


def _address(exam: Examination) -> list[CheckResult]:
    ctx, caller = exam.ctx, exam.caller
    if not caller:
        return _skipped("address", "this machine's address is not used")
    there = describe_inventory(ctx.clients.ec2, exam.spec.name, ("security_groups",))
    group, _ = split_groups(there, key_pair.read_public(ctx.files.key))
    if group and not group.admits(caller):
        found = f"{caller}; cluster {exam.spec.name} allows SSH from {name_some(group.ssh_cidrs)}"
        remedy = f"Allow this address:\nspr-cluster up {ctx.flags}"
        return [_result("address", Verdict.FAIL, found, remedy)]
    return _ok("address", f"AWS sees this machine as {caller}")


def _jump(exam: Examination) -> list[CheckResult]:
    if not exam.spec.jump:
        return []
    require_way(exam.spec.jump)
    notes: list[str] = []
    require_jump(exam.ctx.clients, exam.spec, exam.networks, notes.append)
    if notes:
        return [_result("jump", Verdict.WARN, " ".join(notes))]
    enough = (
        f"this machine's programs and the account's settings suffice for --jump {exam.spec.jump}"
    )
    return _ok("jump", enough)


def _bucket(exam: Examination) -> list[CheckResult]:
    notes = check_buckets(exam.ctx.clients, exam.spec, exam.ctx.cloud)
    return [_result("bucket", Verdict.WARN, each) for each in notes]


def _permissions(exam: Examination) -> list[CheckResult]:
    spec, types = exam.spec, ",".join(exam.spec.instance_types)
    bucket = parse_s3_url(spec.bucket) if spec.bucket and spec.makes_role else None
    boundary = spec.permissions_boundary if spec.makes_role or spec.second_guard else None
    asked = unless(DENIED, exam.ctx.clients.ec2.get_ebs_default_kms_key_id)
    key = asked["KmsKeyId"] if asked else _MANAGED_KEY
    own_key = None if key.endswith(_MANAGED_KEY) else key
    policy = build_policy(
        None,
        spec.instance_types,
        own_key,
        second_guard=spec.second_guard,
        bucket=bucket,
        read_from=spec.makes_role,
        bucket_kms_key=spec.bucket_kms_key,
        permissions_boundary=boundary,
        jump=spec.jump,
    )
    means, findings = judge(exam.ctx.clients, policy)
    allowed, missing, unknown = (
        list(dict.fromkeys(_denied(f) for f in findings if f.state == state))
        for state in ("allowed", "missing", "unknown")
    )
    if not missing:
        rest = f"; {len(unknown)} not checked" if unknown else ""
        rest += "".join(f", among them {each}" for each in CONNECTIONS if each in unknown)
        found = f"{len(allowed)} allowed, by {means}{rest}"
        if own_key:
            found += f"; new disks are encrypted with {own_key}"
            remedy = "The policy of this key must also allow these credentials to use it."
            return [_result("permissions", Verdict.WARN, found, remedy)]
        return _ok("permissions", found)
    more = " --second-guard" if spec.second_guard else ""
    more += f" --kms-key {own_key}" if own_key else ""
    more += f" --bucket {bucket}" if bucket else " --read-from" if spec.makes_role else ""
    more += f" --bucket-kms-key {spec.bucket_kms_key}" if spec.bucket_kms_key else ""
    more += f" --permissions-boundary {boundary}" if boundary else ""
    more += f" --jump {spec.jump}" if spec.jump in (EICE, SSM) else ""
    remedy = (
        "Ask an administrator to allow what `spr-cluster iam-policy` prints. For all that is missing:\n"
        f"spr-cluster iam-policy --check --instance-type {types}{more} --region {exam.ctx.cloud.region}"
    )
    verdict = Verdict.WARN if set(missing) <= OPTIONAL else Verdict.FAIL
    return [_result("permissions", verdict, f"missing: {name_some(missing)}", remedy)]


def _denied(finding: Finding) -> str:
    """Return the IAM action of a finding; a call may need actions besides the one named after it."""
    named = _ACTION.match(finding.why)
    return named[0] if named else finding.action.partition(" ")[0]


def _image(exam: Examination) -> list[CheckResult]:
    return _ok("image", f"{exam.image.id}: {exam.image.name}")


def _tag_policies(exam: Examination) -> list[CheckResult]:
    name = "tag policies"
    try:
        conflicts = find_tag_conflicts(describe_tag_rules(exam.ctx.clients), _tags_of(exam))
    except ClientError as error:
        if error_code(error) not in DENIED:
            raise
        return _skipped(name, "no permission for DescribeEffectivePolicy")
    if conflicts:
        remedy = "An administrator of the organization can allow these tags, or exempt the account."
        return [_result(name, Verdict.FAIL, "; ".join(conflicts), remedy)]
    return _ok(name, "none refuses a cluster's tags")


def _tags_of(exam: Examination) -> dict[str, str]:
    """Return the tags of a cluster's group and machines."""
    ctx, spec = exam.ctx, exam.spec
    record = new_record(spec, ctx.now(), None)
    return {
        **record_tags(spec, record),
        **ctx.owner_labels(None),
        **tags.resource_tags(spec.name, HEAD, **{tags.ROLE: HEAD, tags.STACK: spec.stack}),
    }


def _purchase(exam: Examination) -> Iterable[CheckResult]:
    """Try the first purchase of `up` in each zone, as a dry run."""
    ctx, cluster = exam.ctx, exam.spec.name
    plan_input = prepare(ctx, exam.change, NOBODY)
    plan = plan_up(plan_input)
    kind = next((action.kind for action in plan.actions if action.kind in _ROLES), None)
    if kind is None:
        return _skipped("purchase", f"cluster {cluster} needs no more machines")
    count = 1 if kind is ActionKind.RUN_HEAD else plan_input.spec.nodes - len(plan.keep)
    machines = Machines(ctx, plan_input, plan.keep, tuple)
    image = plan_input.image or exam.image
    bought = machines.purchase(_ROLES[kind], count, image, plan_input.group)
    if not any(each.state == "ready" for each in plan_input.found.instance_profiles):
        # `up` makes it first, and EC2 refuses the name of a profile that does not exist.
        bought = replace(bought, profile="")
    reserved = find_reservations(ctx, plan_input, exam.networks)
    offers = list_offers(plan_input.spec, exam.support, exam.networks, reserved)
    # Of the offers in a zone, the first is in the placement group.
    places = {(offer.place, offer.market): offer for offer in reversed(offers)}
    results = [
        _try_offer(ctx, offer, only_existing(render_request(bought, offer), plan_input.found))
        for offer in reversed(places.values())
    ]
    if not results:
        types = ", ".join(plan_input.spec.instance_types)
        return [_result("purchase", Verdict.FAIL, f"no zone with a usable subnet offers {types}")]
    if any(result.verdict is Verdict.OK for result in results):
        # One zone is enough.
        return [
            replace(r, verdict=Verdict.WARN) if r.verdict is Verdict.FAIL else r for r in results
        ]
    return results


def _try_offer(ctx: Context, offer: Offer, request: dict[str, Any]) -> CheckResult:
    result = partial(_result, "purchase", place=offer.network.zone)
    try:
        ctx.clients.dry.run_instances(**request)
    except ClientError as error:
        if error_code(error) == "DryRunOperation":
            return result(Verdict.OK, "EC2 would accept the request (capacity is not checked)")
        if is_about_default_group(error, request):
            return result(Verdict.SKIPPED, "permitted only in a cluster's group, which `up` makes")
        failure = translate_boto_error(error)
        assert failure, "botocore's errors have a translation"
        return result(Verdict.FAIL, failure.message, failure.hint or "")
    raise AssertionError("a dry run fails by design")


CHECKS = (
    Check("account", _account, needs=()),
    Check("region", _region),
    Check("quota", _quota),
    Check("network", _network, needs=("account", "region")),
    Check("routes", _routes, needs=("account", "network")),
    Check("network ACLs", _acls, needs=("account", "network")),
    Check("port 22", _port_22, needs=()),
    Check("address", _address),
    Check("jump", _jump, needs=("account", "network")),
    Check("bucket", _bucket),
    Check("permissions", _permissions),
    Check("image", _image),
    Check("purchase", _purchase, needs=("account", "network", "image")),
    Check("tag policies", _tag_policies),
)
