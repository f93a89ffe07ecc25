"""The IAM policy that `iam-policy` prints: enough for a cluster's whole life, and nothing too much.

The embedded cloud judges actions, resources, and conditions. A life is lived once; what IAM was asked
in it is then judged by policies that differ in one place each, together with what must be refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError
from moto.iam.models import iam_backends

from infra.ec2 import tags
from infra.ec2.termination_schedule import ClusterGuard
from infra.iam.instance_profile import ClusterProfile
from infra.iam.policy import build_policy
from infra.instance_types import BAKERS
from infra.local.api.policy import Policy, Request
from infra.local.api.spot_requests import SpotRequest
from infra.s3_url import parse_s3_url
from infra.spec import build_spec
from tests.cloud.faults import ActiveFaults
from tests.harness.command_line import CommandLine, CommandResult, open_command_line
from tests.harness.simulated_cloud import install_jump_tools
from tests.infra.local.fakes import Endpoint

# Their absence stops nothing; what the user is told instead.
_INFORMATIVE = {
    **{
        f"ec2:{look}": f"Can't check the route to the machines: no permission for {look}."
        for look in (
            "DescribeNetworkAcls",
            "DescribeRouteTables",
            "DescribeVpcBlockPublicAccessExclusions",
            "DescribeVpcBlockPublicAccessOptions",
            "DescribeVpcEndpoints",
        )
    },
    "ssm:GetServiceSetting": "Can't check the route to the machines: no permission for GetServiceSetting.",
    "ec2:GetConsoleOutput": "its host key was accepted on first contact: no permission for GetConsoleOutput",
    "ec2:DescribeSpotPriceHistory": "Prices: no permission for DescribeSpotPriceHistory.",
    "pricing:GetProducts": "Prices: no permission for GetProducts.",
    "servicequotas:GetServiceQuota": "you have unknown (no permission to read it)",
}
_KEY = "arn:aws:kms:us-east-1:123456789012:key/0123"
_BOUNDARY = "arn:aws:iam::123456789012:policy/boundary"
_TYPES = ("r7iz.metal-16xl", "m7i.metal-24xl", "c7i.xlarge", "m7i.xlarge")
# `list`, `gc`, and `down` without a record look for guards. A denial of that counts as none, and the
# default policy denies it: only the policy with guards can make or remove one, or tell whose it is.
_LOOKS_FOR_GUARDS = {"scheduler:ListScheduleGroups", "scheduler:ListSchedules"}
# The same for the nodes' roles.
_LOOKS_FOR_ROLES = {"iam:ListInstanceProfiles", "iam:GetInstanceProfile"}
# Disks are encrypted with the account's own key, and nobody has bought on spot before.
_RESERVATION = "cr-0123456789abcdef0"
_ACCOUNT = f"[ebs]\nkms_key = '{_KEY}'\n[spot]\nservice_linked_role = false\n"
_PROXIED = ("--private", "--proxy", "http://10.0.0.9:3128")
_RESERVED = (
    f"[[reservation]]\nid = '{_RESERVATION}'\nmatch = 'targeted'\nzone = 'us-east-1a'\n"
    f"instance_type = '{_TYPES[0]}'\ncount = 1\n"
)


@pytest.fixture
def line(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CommandLine]:
    install_jump_tools(monkeypatch)
    with open_command_line(endpoint, tmp_path, monkeypatch) as line:
        yield line


def allow(
    line: CommandLine, folder: Path, policy: dict[str, Any], more: str = "", tag_delay_s: float = 0
) -> None:
    """Put a policy in force. ``more`` are lines of the faults file."""
    file = folder / "policy.json"
    file.write_text(json.dumps(policy))
    blocked = '[network]\nblock_public_access = "block-ingress"\nexcluded = true\n'
    blocked += "endpoints = ['ssm', 'ssmmessages']\n"
    iam = f'[iam]\npolicy = "{file}"\ntag_delay_s = {tag_delay_s}\n'
    line.cloud.faults(f"{more}\n{blocked}{iam}{_RESERVED}")


def leave_orphans(line: CommandLine) -> None:
    """What a cluster of another time has left: one of each kind that no machine takes along."""
    cloud = line.cloud.fake
    labels = {tags.CLUSTER: "old"}

    def specified(kind: str) -> Any:
        return tags.tag_specifications([kind], labels)

    ec2 = cloud.clients.ec2
    zone, subnet = "us-east-1a", ec2.describe_subnets()["Subnets"][0]["SubnetId"]
    ec2.create_volume(AvailabilityZone=zone, Size=20, TagSpecifications=specified("volume"))
    ec2.create_network_interface(SubnetId=subnet, TagSpecifications=specified("network-interface"))
    # A machine's end leaves no request open.
    nobody = SimpleNamespace(id="", placement=SimpleNamespace(zone=zone))
    request = SpotRequest(cloud.backend, nobody, {}, labels)
    cloud.backend.spot_instance_requests[request.id] = request


def live(line: CommandLine) -> Iterator[CommandResult]:
    """A cluster's life, command by command, until one of them fails."""
    types = ("--instance-type", ",".join(_TYPES[:2]))
    for step in (
        ("list", "--all-regions"),
        ("gc", "--yes"),
        ("up", "--dry-run", "--jump", "eice"),
        ("up", "--dry-run", "--jump", "ssm", *_PROXIED, "--subnet-id", subnet_of(line)),
        ("up", "--nodes", "2", "--market", "spot-or-on-demand", *types, "--yes"),
        ("status",),
        ("doctor",),
        ("repair", "--yes"),
        ("extend", "2h"),
        ("up", "--yes"),
        ("up", "--nodes", "1", "--yes"),
        ("down", "--yes"),
        ("bake", "--yes"),
        ("up", "--nodes", "1", "--capacity-reservation", _RESERVATION, "--yes"),
        ("down", "--yes"),
        ("images",),
        ("images", "--delete", "--yes"),
    ):
        if step[0] == "repair":
            line.lose(line.ids()[-1])
            # The status checks of younger metal machines are not asked for.
            line.cloud.clock.now += 2400
        if step == ("up", "--yes"):
            line.cloud.network.caller = "198.51.100.9/32"
        ours = our_images(line) if step[:2] == ("images", "--delete") else []
        result = line.run(*step, *ours)
        yield result
        if result.code != 0:
            return


def live_guarded(line: CommandLine) -> Iterator[CommandResult]:
    """A life with the second guard, the last part of it from leftovers."""
    for step in (
        ("up", "--nodes", "2", "--second-guard", "--yes"),
        ("extend", "2h"),
        ("repair", "--yes"),
        ("list",),
        ("down", "--yes"),
        ("gc", "--yes"),
        ("down", "--yes"),
    ):
        if step[0] == "repair":
            line.lose(line.ids()[-1])
            line.cloud.clock.now += 2400
        if step[0] == "gc":
            guard = ClusterGuard(line.cloud.fake.clients, "forgotten", line.cloud.clock)
            guard.protect([], datetime.now(timezone.utc))
        if step == ("down", "--yes"):
            attach_foreign_policy("spr-cluster-spr-us-east-1-end")
        yield line.run(*step)


def attach_foreign_policy(role: str) -> None:
    """Attach a managed policy, and embed another, as accounts do that govern all roles."""
    iam = iam_backends["123456789012"]["aws"]
    if role in {each.name for each in iam.roles.values()}:
        arn = "arn:aws:iam::123456789012:policy/of-all"
        if arn not in iam.managed_policies:
            iam.create_policy("", "/", json.dumps(build_policy()), "of-all", [])
        iam.attach_role_policy(arn, role)
        iam.get_role(role).put_policy("of-the-organization", "{}")


def our_images(line: CommandLine) -> list[str]:
    backend = line.cloud.fake.backend
    return [image.id for image in backend.amis.values() if image.owner_id == backend.account_id]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Request]:
    """What IAM decides on from now on."""
    seen: dict[str, Request] = {}
    allows = ActiveFaults.allows

    def note(self: ActiveFaults, request: Request) -> bool:
        seen[repr(request)] = request
        return allows(self, request)

    monkeypatch.setattr(ActiveFaults, "allows", note)
    return seen


def test_a_clusters_lifecycle_needs_this_policy_and_no_more(
    line: CommandLine, tmp_path: Path, asked: dict[str, Request]
) -> None:
    leave_orphans(line)
    asked.clear()
    policy = build_policy(instance_types=_TYPES, kms_key=_KEY)
    allow(line, tmp_path, policy, _ACCOUNT)
    calls = line.call_log.calls

    for result in live(line):
        assert result.code == 0, result.err
        # Each command asks once who calls.
        assert [call.action for call in calls].count("sts:GetCallerIdentity") <= 1
        calls.clear()

    assert line.cloud.left() == []
    looks = _LOOKS_FOR_GUARDS | _LOOKS_FOR_ROLES
    tolerated = [request for request in asked.values() if request.action in looks]
    assert tolerated
    needed = [request for request in asked.values() if request not in tolerated]
    assert_no_more(policy, policy["Statement"], needed, at_least=150)


def test_a_life_with_the_second_guard_needs_these_statements_and_no_more(
    line: CommandLine, tmp_path: Path, asked: dict[str, Request]
) -> None:
    default = build_policy(instance_types=_TYPES)
    policy = build_policy(instance_types=_TYPES, second_guard=True)
    allow(line, tmp_path, policy)

    for result in live_guarded(line):
        assert result.code == 0, result.err

    assert line.cloud.left() == []
    added = [each for each in policy["Statement"] if each not in default["Statement"]]
    needed = [request for request in asked.values() if request.action not in _LOOKS_FOR_ROLES]
    assert_no_more(policy, added, needed, at_least=50)


def live_with_bucket(line: CommandLine) -> Iterator[CommandResult]:
    """A life with a role of the nodes, which ends with one that has been left over."""
    boundary = ("--permissions-boundary", _BOUNDARY)
    yield line.run("up", "--nodes", "1", "--bucket", "s3://team-b/results", *boundary, "--yes")
    yield line.run("list")
    attach_foreign_policy("spr-cluster-spr-us-east-1-s3")
    yield line.run("down", "--yes")
    options = {"bucket": "s3://team-b/results", "permissions_boundary": _BOUNDARY}
    spec = build_spec(name="forgotten", ssh_cidrs=("192.0.2.1/32",), **options)
    ClusterProfile(line.cloud.fake.clients, "forgotten", line.cloud.clock).make(spec)
    yield line.run("gc", "--yes")


def test_a_life_with_a_bucket_needs_these_statements_and_no_more(
    line: CommandLine, tmp_path: Path, asked: dict[str, Request]
) -> None:
    place = parse_s3_url("s3://team-b/results")
    s3 = line.cloud.fake.clients.s3
    s3.create_bucket(Bucket="team-b")
    s3.put_bucket_versioning(Bucket="team-b", VersioningConfiguration={"Status": "Enabled"})
    asked.clear()
    default = build_policy(instance_types=_TYPES)
    policy = build_policy(
        instance_types=_TYPES,
        bucket=place,
        bucket_kms_key=_KEY,
        permissions_boundary=_BOUNDARY,
    )
    allow(line, tmp_path, policy)

    for result in live_with_bucket(line):
        assert result.code == 0, result.err

    assert line.cloud.left() == []
    iam = iam_backends["123456789012"]["aws"]
    assert not iam.instance_profiles
    assert not iam.roles
    added = [each for each in policy["Statement"] if each not in default["Statement"]]
    results = [
        Request("s3:GetObject", "arn:aws:s3:::team-b/results/job/log", {}),
        Request("s3:ListBucket", "arn:aws:s3:::team-b", {"s3:prefix": "results/job/"}),
        Request("kms:Decrypt", _KEY, {"kms:ViaService": "s3.us-east-1.amazonaws.com"}),
    ]
    ignored = {"s3:ListBucket", *_LOOKS_FOR_GUARDS}
    rights = [request for request in asked.values() if request.action not in ignored]
    assert_no_more(policy, added, [*rights, *results], at_least=50)


def test_an_existing_profile_needs_its_role_passed_and_no_other(
    line: CommandLine, tmp_path: Path
) -> None:
    iam = line.cloud.fake.clients.iam
    for name in ("nodes", "admin"):
        iam.create_role(RoleName=name, Path="/team/", AssumeRolePolicyDocument="{}")
        iam.create_instance_profile(InstanceProfileName=f"{name}-profile")
        iam.add_role_to_instance_profile(InstanceProfileName=f"{name}-profile", RoleName=name)
    types = ("--instance-type", _TYPES[0])
    printed = line.must("iam-policy", *types, "--instance-profile", "team/nodes").out
    allow(line, tmp_path, json.loads(printed))

    line.must("up", "--nodes", "1", *types, "--instance-profile", "nodes-profile", "--yes")
    line.must("down", "--yes")
    denied = line.run("up", "--nodes", "1", *types, "--instance-profile", "admin-profile", "--yes")
    assert "no permission for PassRole" in denied.message


def assert_no_more(
    policy: dict[str, Any],
    statements: list[dict[str, Any]],
    asked: Iterable[Request],
    *,
    at_least: int,
) -> None:
    """What a life has asked for needs exactly these statements of its policy: each change is noticed."""
    needed = distinct([*asked, *variants(asked)])
    own = actions_of({"Statement": statements})
    services = {action.partition(":")[0] for action in own}
    assert {r.action for r in needed if r.action.partition(":")[0] in services} == own
    forbidden = distinct(forbidden_by(needed))
    judge = Policy(policy["Statement"])
    assert [request for request in needed if not judge.allows(request)] == []
    assert [request for request in forbidden if judge.allows(request)] == []
    # All statements allow, so a request depends on a statement if no other one allows it.
    judges = [Policy([statement]) for statement in statements]
    by = [(request, [judge.allows(request) for judge in judges]) for request in needed]
    changed = list(mutants(statements))
    assert len(changed) > at_least
    unnoticed = [
        what
        for what, number, mutant in changed
        if not any(map(mutant.allows, forbidden))
        and all(mutant.allows(r) for r, allowed in by if allowed[number] and sum(allowed) == 1)
    ]
    assert unnoticed == []


def actions_of(policy: dict[str, Any]) -> set[str]:
    return {action for statement in policy["Statement"] for action in statement["Action"]}


def distinct(requests: Iterable[Request]) -> list[Request]:
    """Leave out requests that differ only in ids and in the values of tags."""
    kinds: dict[Any, Request] = {}
    for request in requests:
        keys = {k: None if "Tag" in k else v for k, v in request.context.items()}
        resource = re.sub(r"/(\w+)-[0-9a-f]{17}$", r"/\1", request.resource)
        kinds.setdefault((request.action, resource, tuple(sorted(keys.items()))), request)
    return list(kinds.values())


def variants(requests: Iterable[Request]) -> Iterator[Request]:
    """What is needed as well: every type, and Canonical's images by their other owner."""
    for request in requests:
        if "ec2:InstanceType" in request.context:
            for name in _TYPES:
                yield with_key(request, "ec2:InstanceType", name)
        if request.context.get("ec2:Owner") == "099720109477":
            for owner in ("amazon", "513442679011", "837727238323"):
                yield with_key(request, "ec2:Owner", owner)


def with_key(request: Request, key: str, value: str | None) -> Request:
    """Return the same request with another value of a condition key, or without it."""
    rest = {k: v for k, v in request.context.items() if k != key}
    return replace(request, context=rest if value is None else {**rest, key: value})


# One change of a value, by which what is needed becomes what must be refused.
_WRONG: dict[str, str | None] = {
    f"aws:RequestTag/{tags.CLUSTER}": None,
    f"aws:ResourceTag/{tags.CLUSTER}": None,
    "ec2:CreateAction": "CreateVolume",
    "ec2:Encrypted": "false",
    "ec2:InstanceType": "p5.48xlarge",
    "ec2:MetadataHttpTokens": "optional",
    "ec2:Owner": "111122223333",
    "iam:AWSServiceName": "ecs.amazonaws.com",
    "iam:PermissionsBoundary": None,
    "s3:prefix": "results-of-others/",
    "iam:PassedToService": "lambda.amazonaws.com",
    "kms:GrantIsForAWSResource": "false",
    "kms:ViaService": "lambda.us-east-1.amazonaws.com",
}
_ELSEWHERE = {
    "key-pair/spr-cluster-": "key-pair/theirs-",
    "placement-group/spr-cluster-": "placement-group/theirs-",
    "parameter/aws/service/canonical/": "parameter/secrets/",
    "/default-ec2-instance-management-role": "/activation-tier",
    "role/aws-service-role/spot.amazonaws.com/": "role/aws-service-role/ecs.amazonaws.com/",
    "instance-profile/spr-cluster-": "instance-profile/theirs-",
    "us-east-1-s3": "us-east-1-admin",
    "us-east-1-end": "us-east-1-admin",
    "team-b/results/": "team-b/others/",
    ":::team-b": ":::team-c",
    "role/spr-cluster-": "role/theirs-",
    "schedule-group/spr-cluster-": "schedule-group/theirs-",
    "schedule/spr-cluster-": "schedule/theirs-",
    "/AWSServiceRoleForEC2Spot": "/AnotherRole",
    "key/0123": "key/4567",
}
_NEVER = (
    *("ec2:DeleteTags", "ec2:DescribeVpcAttribute", "ec2:ModifyInstanceAttribute"),
    *("ec2:StopInstances", "iam:AttachRolePolicy", "iam:CreateRole", "iam:PassRole"),
    *("iam:UpdateAssumeRolePolicy", "kms:ScheduleKeyDeletion", "organizations:LeaveOrganization"),
    *("pricing:DescribeServices", "servicequotas:RequestServiceQuotaIncrease"),
    *("scheduler:UntagResource", "s3:DeleteBucket", "s3:PutObject", "ssm:PutParameter"),
)


def forbidden_by(needed: Iterable[Request]) -> Iterator[Request]:
    """Yield what no policy of this tool may allow: what it needs, with one thing wrong."""
    made = "CreateTags"
    never = [action for action in _NEVER if action not in {r.action for r in needed}]
    for request in needed:
        at_creation = request.action.endswith(made) and "ec2:CreateAction" in request.context
        own = f"aws:ResourceTag/{tags.CLUSTER}" in request.context
        for key, wrong in _WRONG.items():
            # The tags of tagging itself, and the owner of our own images, do not matter.
            ignored = (request.action.endswith(made) and "RequestTag" in key) or (
                own and key == "ec2:Owner"
            )
            if key in request.context and not ignored:
                yield with_key(request, key, wrong)
        for part, other in _ELSEWHERE.items():
            if part in request.resource and not own and not at_creation:
                yield replace(request, resource=request.resource.replace(part, other))
        if at_creation:
            yield with_key(request, "ec2:CreateAction", None)
        elif not own and ":ec2:" in request.resource:
            # AWS may add kinds, with the keys of today's.
            kind = request.resource.rpartition(":")[2].partition("/")[0]
            yield replace(request, resource=request.resource.replace(f"{kind}/", "kind-to-come/"))
        for action in never:
            yield replace(request, action=action)
    # A disk from somebody's snapshot, a machine by somebody's template.
    example = next(r for r in needed if r.action == "ec2:RunInstances")
    always = {
        k: v for k, v in example.context.items() if k in ("ec2:Region", "aws:PrincipalAccount")
    }
    template = "arn:aws:ec2:us-east-1:123456789012:launch-template/lt-1"
    yield Request(example.action, template, always)
    snapshot = "arn:aws:ec2:us-east-1::snapshot/snap-1"
    yield Request(example.action, snapshot, {**always, "ec2:Owner": "amazon"})


def mutants(statements: list[dict[str, Any]]) -> Iterator[tuple[str, int, Policy]]:
    """Yield each statement with one action, resource, or condition narrowed or widened."""
    for number, statement in enumerate(statements):

        def put(what: str, number: int = number, **changes: Any) -> tuple[str, int, Policy]:
            mutant = {**statements[number], **changes}
            return f"{mutant['Sid']}: {what}", number, Policy([mutant])

        for action in statement["Action"]:
            rest = [other for other in statement["Action"] if other != action]
            yield put(f"without {action}", Action=rest)
            yield put(f"all beside {action}", Action=[*rest, f"{action.partition(':')[0]}:*"])
        given = statement["Resource"]
        for resource in given if isinstance(given, list) else [given]:
            rest = [other for other in given if other != resource and isinstance(given, list)]
            yield put(f"not on {resource}", Resource=rest)
            if resource != "*":
                yield put(f"on all beside {resource}", Resource=[*rest, "*"])
                for end in ("[^:]*$", "/.*", "[^/]*$"):
                    short = re.sub(end, "/*" if end == "/.*" else "*", resource, count=1)
                    if short != resource:
                        yield put(f"on {short}", Resource=[*rest, short])
        for operator, tests in statement.get("Condition", {}).items():
            for key, values in tests.items():
                yield from (
                    put(f"{key}: {what}", Condition=changed)
                    for what, changed in other_conditions(
                        statement["Condition"], operator, key, values
                    )
                )


def other_conditions(
    condition: dict[str, Any], operator: str, key: str, values: Any
) -> Iterator[tuple[str, dict[str, Any]]]:
    def given(new: Any) -> dict[str, Any]:
        tests = {k: v for k, v in condition[operator].items() if k != key}
        return {**condition, operator: tests if new is None else {**tests, key: new}}

    listed = values if isinstance(values, list) else [values]
    yield "any", given(None)
    for value in listed:
        yield f"without {value}", given([other for other in listed if other != value] or ["none"])
    if wrong := _WRONG.get(key):
        yield f"also {wrong}", given([*listed, wrong])
    if operator == "Null":
        yield "absent", given("true")


def subnet_of(line: CommandLine) -> str:
    return str(next(iter(line.cloud.fake.backend.subnets["us-east-1a"])))


_SSM = ("--dry-run", "--jump", "ssm", *_PROXIED)


@pytest.mark.parametrize(
    ("actions", "options"),
    [
        # At most one of those about the route.
        ({"ec2:DescribeNetworkAcls", "pricing:GetProducts"}, ("--dry-run",)),
        ({"ec2:DescribeRouteTables", "ec2:DescribeSpotPriceHistory"}, ("--dry-run",)),
        (
            {"ec2:DescribeVpcBlockPublicAccessExclusions", "servicequotas:GetServiceQuota"},
            ("--dry-run",),
        ),
        # A host key is read where a machine has been bought.
        ({"ec2:DescribeVpcBlockPublicAccessOptions", "ec2:GetConsoleOutput"}, ("--yes",)),
        ({"ec2:DescribeVpcEndpoints"}, _SSM),
        ({"ssm:GetServiceSetting"}, _SSM),
    ],
)
def test_without_looks_that_only_inform_a_life_is_poorer_and_says_which(
    line: CommandLine, tmp_path: Path, actions: set[str], options: tuple[str, ...]
) -> None:
    allow(line, tmp_path, without(*actions))

    result = line.must("up", "--nodes", "1", "--market", "spot", *options)

    said = {action for action, text in _INFORMATIVE.items() if text in result.err + result.out}
    assert said == actions


def test_a_tunnel_needs_a_look_at_the_endpoints_and_a_cluster_none_at_reservations(
    line: CommandLine, tmp_path: Path
) -> None:
    looks = ("DescribeInstanceConnectEndpoints", "DescribeCapacityReservations", "DescribeVpcs")
    allow(line, tmp_path, without(*(f"ec2:{look}" for look in looks)))

    result = line.run("up", "--dry-run", "--jump", "eice")
    assert result.code == 1
    assert "no permission for DescribeInstanceConnectEndpoints" in result.message
    line.must("up", "--nodes", "1", "--subnet-id", subnet_of(line), "--yes")


def without(*actions: str) -> dict[str, Any]:
    """Return the policy without some actions."""
    policy = build_policy()
    for statement in policy["Statement"]:
        statement["Action"] = [each for each in statement["Action"] if each not in actions]
    return policy


def test_tags_that_iam_does_not_see_yet_stop_nothing(line: CommandLine, tmp_path: Path) -> None:
    allow(line, tmp_path, build_policy(), tag_delay_s=5)
    began = line.cloud.clock.now

    for command in ("up --nodes 2 --yes", "extend 2h", "down --yes", "bake --yes"):
        line.must(*command.split())

    # A cluster and an image were made, each with a new group.
    assert line.changes["ec2:AuthorizeSecurityGroupIngress"] > 2 * 2
    assert line.cloud.clock.now - began < 600


@pytest.mark.parametrize("market", ["on-demand", "spot"])
def test_a_key_for_disks_that_may_not_be_used_is_named_and_nothing_is_bought_again(
    line: CommandLine, tmp_path: Path, market: str
) -> None:
    allow(line, tmp_path, build_policy(), f"[ebs]\nkms_key = '{_KEY}'\n")

    result = line.run("up", "--nodes", "2", "--market", market, "--yes")

    assert result.code == 1
    assert "no permission to use the key that encrypts new disks" in result.message
    assert "spr-cluster iam-policy --kms-key ARN" in result.message
    grant = "aws kms create-grant --key-id ARN --grantee-principal"
    assert (grant in result.message) is (market == "spot")
    assert line.changes["ec2:RunInstances"] == 1
    assert line.ids("pending", "running") == []


def test_spots_role_needs_a_permission_only_where_it_is_missing(
    line: CommandLine, tmp_path: Path
) -> None:
    policy = without("iam:CreateServiceLinkedRole")
    allow(line, tmp_path, policy, "[spot]\nservice_linked_role = false\n")

    result = line.run("up", "--nodes", "1", "--market", "spot", "--yes")

    assert result.code == 1
    assert "AuthFailure.ServiceLinkedRoleCreationNotPermitted" in result.message
    assert "aws iam create-service-linked-role" in result.message
    allow(line, tmp_path, policy)
    line.must("up", "--nodes", "1", "--market", "spot", "--yes")


# --check


def test_a_check_by_dry_runs_makes_nothing_and_names_what_is_missing(
    line: CommandLine, tmp_path: Path
) -> None:
    policy = build_policy(instance_types=_TYPES[:1])
    allow(line, tmp_path, policy)
    check = ("iam-policy", "--check", "--instance-type")

    assert line.must(*check, _TYPES[0]).out.startswith("not checked, no resource of this tool")
    assert line.cloud.left() == []
    result = line.run(*check, ",".join(_TYPES[:2]))
    assert result.code == 1
    assert result.message.startswith("1 permission missing\n  → ask an administrator")
    (missing,) = [text for text in result.out.splitlines() if text.startswith("missing")]
    about = f"ec2:RunInstances of {_TYPES[1]}, on-demand, in the default group"
    assert missing.startswith(f"missing: {about}: ec2:RunInstances on arn:aws:ec2:")

    allow(line, tmp_path, without("ec2:ImportKeyPair"))
    result = line.run(*check, _TYPES[0], "--json")
    assert (result.code, result.message.splitlines()[0]) == (1, "1 permission missing")
    found = json.loads(result.out)
    assert found["means"] == "dry runs"
    assert [each["action"] for each in found["missing"]] == ["ec2:ImportKeyPair"]
    assert "ec2:TerminateInstances" in {each["action"] for each in found["unknown"]}


def test_a_check_by_dry_runs_can_only_look_for_guards(line: CommandLine, tmp_path: Path) -> None:
    guard = ("iam-policy", "--check", "--second-guard", "--instance-type", _TYPES[0])
    allow(line, tmp_path, build_policy(instance_types=_TYPES[:1]))

    result = line.run(*guard)

    assert result.code == 1
    assert result.message.startswith("2 permissions missing\n")
    missing = [text for text in result.out.splitlines() if text.startswith("missing")]
    assert [text.split(":", 3)[1:3] for text in missing] == [
        [" scheduler", look.partition(":")[2]] for look in sorted(_LOOKS_FOR_GUARDS)
    ]
    (unknown,) = [text for text in result.out.splitlines() if "it has no dry run" in text]
    assert "scheduler:CreateSchedule, " in unknown
    assert "iam:PassRole" in unknown
    assert line.cloud.left() == []
    allow(line, tmp_path, build_policy(instance_types=_TYPES[:1], second_guard=True))
    assert "missing: " not in line.must(*guard).out


def test_a_check_needs_no_permission_at_all(line: CommandLine, tmp_path: Path) -> None:
    for policy, needed in (
        ({"Statement": []}, "ec2:DescribeImages: ec2:DescribeImages on *"),
        (without("ssm:GetParameter"), "ssm:GetParameter: ssm:GetParameter on arn:aws:ssm:"),
    ):
        allow(line, tmp_path, policy)
        result = line.run("iam-policy", "--check")
        assert result.code == 1
        assert f"missing: {needed}" in result.out
    line.cloud.faults("")
    leave_orphans(line)
    line.must("up", "--nodes", "2", "--market", "spot", "--yes")
    before = line.cloud.left()
    allow(line, tmp_path, without("ec2:DeleteVolume"))

    # It tries changes on what exists.
    found = json.loads(line.run("iam-policy", "--check", "--json").out)

    assert {each["action"] for each in found["missing"]} == {"ec2:DeleteVolume"}
    assert [each["action"] for each in found["unknown"]] == ["iam:CreateServiceLinkedRole"]
    assert line.cloud.left() == before


# What is printed


_CHOICES = (
    ("--kms-key", _KEY),
    ("--push-to", "s3://my-models/squad"),
    ("--second-guard",),
    ("--bucket", "s3://" + "b" * 63 + "/" + "prefix/" * 20, "--bucket-kms-key", _KEY),
    ("--permissions-boundary", _BOUNDARY),
    ("--instance-type", ",".join(_TYPES)),
    ("--instance-profile", "team/nodes"),
    ("--jump", "ssm"),
    ("--read-from",),
)


def test_every_part_of_a_policy_fits_into_a_managed_policy_and_they_are_whole_together(
    line: CommandLine,
) -> None:
    """https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_iam-quotas.html"""
    needed = set()
    numbers = range(len(_CHOICES))
    alone = [tuple(n == taken for n in numbers) for taken in numbers]
    all_but_one = [tuple(n != left for n in numbers) for left in numbers]
    for taken in (*alone, *all_but_one, (True,) * len(_CHOICES)):
        chosen = [each for each, is_taken in zip(_CHOICES, taken, strict=True) if is_taken]
        options = [word for each in chosen for word in each]
        if "--permissions-boundary" in options and not (taken[2] or taken[3] or taken[-1]):
            continue
        result = line.run("iam-policy", *options)
        count = 1
        if result.code:
            (text,) = re.findall(r"it has (\d) parts", result.message)
            assert (result.code, result.out) == (2, "")
            count = int(text)
        needed.add(count)
        parts = [
            line.must("iam-policy", *options, *(["--part", str(n + 1)] if count > 1 else [])).out
            for n in range(count)
        ]
        assert all(len(re.sub(r"\s", "", part)) <= 6144 for part in parts)
        sids = [s["Sid"] for part in parts for s in json.loads(part)["Statement"]]
        assert len(sids) == len(set(sids))
        assert ("PassNodeRole" in sids, "PassGuardRole" in sids) == (
            taken[3] or taken[-1],
            taken[2],
        )
    assert needed == {1, 2}


def test_a_boundary_bounds_every_role_that_the_policy_can_give_rights(
    line: CommandLine, tmp_path: Path
) -> None:
    """Without the condition on both calls, a user with the policy could make an administrator."""
    policy = build_policy(
        instance_types=_TYPES[:1], second_guard=True, read_from=True, permissions_boundary=_BOUNDARY
    )
    line.cloud.fake.clients.s3.create_bucket(Bucket="team-b")
    iam = line.cloud.fake.clients.iam
    trust = json.dumps({"Version": "2012-10-17", "Statement": []})
    for name in ("spr-cluster-x-us-east-1-s3", "spr-cluster-x-us-east-1-end"):
        iam.create_role(RoleName=name, AssumeRolePolicyDocument=trust)
    allow(line, tmp_path, policy)

    for name in ("spr-cluster-x-us-east-1-s3", "spr-cluster-x-us-east-1-end"):
        with pytest.raises(ClientError, match="iam:PutRolePolicy"):
            iam.put_role_policy(RoleName=name, PolicyName="all", PolicyDocument=trust)
        with pytest.raises(ClientError, match="iam:CreateRole"):
            iam.create_role(RoleName=name.replace("x", "y"), AssumeRolePolicyDocument=trust)
    up = ("up", "--nodes", "1", "--instance-type", _TYPES[0], "--yes")
    guard, read = ("--second-guard",), ("--read-from", "s3://team-b/data")
    bucket = ("--bucket", "s3://team-b/results")
    for number, options in enumerate((guard, bucket, read)):
        refused = line.run(*up, *options, "--name", f"refused-{number}")
        assert "no permission for CreateRole" in refused.message
    line.must(*up, *guard, *bucket, *read, "--permissions-boundary", _BOUNDARY)
    line.must("down", "--yes", "--name", "spr")


def test_the_policy_names_every_action_in_full(line: CommandLine) -> None:
    chosen = line.must("iam-policy", "--instance-type", "c7i.xlarge", "--kms-key", _KEY).out
    printed = json.loads(line.must("iam-policy").out)

    assert json.loads(chosen) == build_policy(instance_types=["c7i.xlarge"], kms_key=_KEY)
    assert printed == build_policy()
    types = printed["Statement"][2]["Condition"]["StringEquals"]["ec2:InstanceType"]
    assert {"r7iz.metal-16xl", *BAKERS} <= set(types)
    assert "c6i.16xlarge" not in types
    named = actions_of(printed)
    assert not any("*" in action for action in named)
    # Whoever has it changes nobody's permissions.
    assert {action for action in named if not action.startswith("ec2:")} == {
        "iam:CreateServiceLinkedRole",
        "organizations:DescribeEffectivePolicy",
        "pricing:GetProducts",
        "servicequotas:GetServiceQuota",
        "ssm:GetParameter",
        "ssm:GetServiceSetting",
    }
