"""`spr-cluster doctor`: each fault of an account is named, and nothing else is."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.lifecycle import doctor
from cluster.lifecycle.doctor import Check, Examination
from cluster.verify.results import CheckResult
from infra.iam.dry_runs import describe_tag_rules, find_tag_conflicts
from infra.iam.simulation import Finding
from tests.cluster.cli.test_iam_policy import without
from tests.harness.command_line import ApiCall, CommandLine
from tests.harness.simulated_cloud import install_jump_tools

_DOCTOR = ("doctor", "--nodes", "2")
_BOUNDARY = "arn:aws:iam::123456789012:policy/boundary"
_NEW = ("KeyName", "Placement.", "NetworkInterface.1.SecurityGroupId.")


def examine(line: CommandLine, *options: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the exit code, and the results that are not ok, by check."""
    result = line.run(*_DOCTOR, *options, "--json")
    # IAM's simulator changes nothing either.
    changing = [c for c in line.call_log.calls if c.changes and "Simulate" not in c.action]
    assert {call.parameters.get("DryRun") for call in changing} <= {"true"}
    found = json.loads(result.out)["checks"]
    return result.code, {each["check"]: each for each in found if each["verdict"] != "ok"}


def enforce(line: CommandLine, folder: Path, policy: dict[str, Any]) -> None:
    """Put a policy in force."""
    (folder / "policy.json").write_text(json.dumps(policy))
    line.cloud.faults(f'[iam]\npolicy = "{folder / "policy.json"}"\n')


def deny(line: CommandLine, folder: Path, action: str, resource: Any) -> None:
    """Deny an action, and nothing else."""
    everything = {"Effect": "Allow", "Action": "*", "Resource": "*"}
    denied = {"Effect": "Deny", "Action": action, "Resource": resource}
    enforce(line, folder, {"Statement": [everything, denied]})


@pytest.mark.parametrize(
    ("fault", "check", "says"),
    [
        ("[network]\ninternet_gateway = false", "routes", "has no route for 0.0.0.0/0"),
        ("[network]\nfirewall = true", "routes", "goes through a firewall endpoint"),
        ("[network]\nacl = 'no-ssh'", "network ACLs", "denies SSH"),
        ("[network]\nacl = 'no-downloads'", "network ACLs", "downloads"),
        ("[network]\nssh = 'blocked'", "port 22", "an SSH server of AWS: timed out"),
        ("[quota]\non_demand_vcpus = 127", "quota", "L-1216C47A is 127 vCPUs: 2 nodes of r7iz"),
        ("[quota]\nspot_vcpus = 5", "quota", "L-34B43A08 is 5 vCPUs"),
        ("[quota]\non_demand_vcpus = 128\nspot_vcpus = 128", "", ""),
    ],
)
def test_it_names_the_fault_and_no_other(
    line: CommandLine, fault: str, check: str, says: str
) -> None:
    options = ("--market", "spot") if "spot" in fault else ()
    line.cloud.faults(fault)

    code, bad = examine(line, *options)

    assert list(bad) == ([check] if check else [])
    for found in bad.values():
        assert says in found["found"]
        assert bool(found["remedy"]) is ("firewall" not in fault)
    assert code == int(bool(check) and "firewall" not in fault)


def test_an_existing_cluster_keeps_its_options(line: CommandLine) -> None:
    kind = ("--instance-type", "m7i.metal-24xl", "--market", "spot")
    line.must("up", "--nodes", "2", *kind, "--yes")
    line.call_log.calls.clear()
    line.cloud.faults("[quota]\nspot_vcpus = 200\n")
    three = ("--nodes", "3")

    code, bad = examine(line, *three, "--max-price", "4")
    assert (code, list(bad)) == (1, ["quota"])
    assert "3 nodes of m7i.metal-24xl" in bad["quota"]["found"]
    line.cloud.faults("[quota]\non_demand_vcpus = 100\nspot_vcpus = 96\n")
    assert examine(line, *three, "--market", "on-demand") == (0, {})
    other = line.must("up", *three, "--market", "on-demand", "--dry-run")
    assert "needs 96 vCPUs, you have 100." in other.out
    either = line.must("up", *three, "--market", "spot-or-on-demand", "--dry-run")
    assert "needs 288 vCPUs, you have 96. That is too few: EC2 refuses spot" in either.out
    refused = line.run(*_DOCTOR, "--stack", "intel")
    assert (refused.code, "was created with upstream" in refused.message) == (2, True)
    smaller = line.must("doctor", "--nodes", "1", "--market", "on-demand")
    assert "L-1216C47A needs 0 vCPUs" in smaller.out


@pytest.mark.parametrize(
    ("action", "checks"),
    [
        ("none", set()),
        ("ec2:CreateSecurityGroup", {"permissions"}),
        ("ec2:RunInstances", {"permissions", "purchase"}),
        ("ssm:GetParameter", {"permissions", "image"}),
        # Less is known without it, but nothing fails.
        ("servicequotas:GetServiceQuota", set()),
    ],
)
def test_it_names_the_missing_permission(
    line: CommandLine, tmp_path: Path, action: str, checks: set[str]
) -> None:
    enforce(line, tmp_path, without(action))

    code, bad = examine(line)

    assert {name for name, each in bad.items() if each["verdict"] == "fail"} == checks
    if action != "none":
        assert bad.pop("permissions")["found"] == f"missing: {action}"
    else:
        group = "permitted only in a cluster's group, which `up` makes"
        assert {name: each["found"] for name, each in bad.items()} == {"purchase": group}
    assert code == (1 if checks else 0)


def test_the_users_own_key_for_disks_is_judged_as_well(
    line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "arn:aws:kms:us-east-1:123456789012:key/0123"
    line.cloud.faults(f"[ebs]\nkms_key = '{key}'\n")

    code, bad = examine(line)
    assert (code, list(bad)) == (0, ["permissions"])
    assert f"new disks are encrypted with {key}" in bad["permissions"]["found"]

    def judge(_: object, policy: Any) -> tuple[str, list[Finding]]:
        actions = [
            each for s in policy["Statement"] if s["Resource"] == key for each in s["Action"]
        ]
        return "simulation", [Finding(each, "missing") for each in actions[:1]]

    monkeypatch.setattr("cluster.lifecycle.doctor.judge", judge)
    code, bad = examine(line)
    assert (code, bad["permissions"]["found"]) == (1, "missing: kms:CreateGrant")
    assert f"--kms-key {key}" in bad["permissions"]["remedy"]


@pytest.mark.parametrize(("refused", "verdict"), [(1, "warn"), (6, "fail")])
def test_one_zone_that_accepts_the_purchase_is_enough(
    line: CommandLine, tmp_path: Path, refused: int, verdict: str
) -> None:
    found = line.cloud.fake.clients.ec2.describe_subnets()["Subnets"]
    subnets = sorted(found, key=lambda subnet: subnet["AvailabilityZone"])[:refused]
    deny(line, tmp_path, "ec2:RunInstances", [subnet["SubnetArn"] for subnet in subnets])

    assert examine(line)[1]["purchase"]["verdict"] == verdict


def test_ec2_judges_the_purchase_that_up_makes(line: CommandLine) -> None:
    # Before the first purchase there are no names to give, and no key whose fingerprint is a tag.
    for nodes, missing in (("1", (*_NEW, "TagSpecification")), ("2", ())):
        start = len(line.call_log.calls)
        line.must("doctor", "--nodes", nodes)
        tried = _purchases(line.call_log.calls[start:])
        start = len(line.call_log.calls)
        line.must("up", "--nodes", nodes, "--yes")
        bought = _purchases(line.call_log.calls[start:])[0]

        expected = {k: v for k, v in bought.items() if not k.startswith(missing)}
        assert expected in [{k: v for k, v in each.items() if k in expected} for each in tried]


def _purchases(calls: list[ApiCall]) -> list[dict[str, str]]:
    """Return what RunInstances was asked for, without what makes a request unique or dry."""
    return [
        {k: v for k, v in call.parameters.items() if k not in ("ClientToken", "DryRun")}
        for call in calls
        if call.action == "ec2:RunInstances" and call.parameters.get("MaxCount")
    ]


def test_a_new_address_of_this_machine_is_named(line: CommandLine) -> None:
    line.begin("--nodes", "2")
    line.cloud.faults('[network]\ncaller = "198.51.100.9/32"\n')

    result = line.run(*_DOCTOR)

    assert "198.51.100.9/32; cluster spr allows SSH from 203.0.113.7/32" in result.out
    assert "fail: address\n  → Allow this address:\n    spr-cluster up --name spr" in result.out
    assert (result.code, result.message) == (1, "1 of 12 checks failed: address")


def test_without_valid_credentials_the_rest_is_skipped(line: CommandLine) -> None:
    line.cloud.faults("[[error]]\naction = 'GetCallerIdentity'\ncode = 'ExpiredToken'\ntimes = 9")

    code, bad = examine(line)

    assert code == 1
    assert "AWS rejected the credentials" in bad.pop("account")["found"]
    assert {each["verdict"] for each in bad.values()} == {"skipped"}
    assert "port 22" not in bad


def test_a_check_without_an_answer_does_not_hold_up_the_others(
    line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = threading.Event()

    def wait(_: Examination) -> list[CheckResult]:
        end.wait()
        return []

    silent, after = Check("silent", wait, needs=()), Check("after", wait, needs=("silent",))
    monkeypatch.setattr(doctor, "CHECKS", [*doctor.CHECKS[:1], silent, after])
    monkeypatch.setattr(doctor, "_DEADLINE_S", 1.0)
    monkeypatch.setattr("cluster.context._RECORD_S", 1.0)
    monkeypatch.setattr("cluster.context.describe_inventory", lambda *_: end.wait())

    code, bad = examine(line)
    end.set()

    assert code == 1
    assert {name: each["found"] for name, each in bad.items()} == {
        "silent": "no answer within 1 s",
        "after": "not checked: needs silent",
    }


@pytest.mark.parametrize(
    ("rule", "conflict"),
    [
        ({"tag_key": "Name", "tag_value": ["prod-*"]}, "the tag Name is a-head but must be prod-*"),
        ({"tag_key": "NAME"}, "the tag Name must be NAME"),
        ({"tag_key": "Name", "tag_value": ["prod", "a-*"]}, ""),
        ({"tag_value": ["prod"], "enforced_for": ["s3:bucket"]}, ""),
    ],
)  # fmt: skip
def test_tag_policies(rule: dict[str, Any], conflict: str) -> None:
    content = {"tags": {"name": {"enforced_for": ["ec2:instance"], **rule}, "costcenter": rule}}
    answer = {"EffectivePolicy": {"PolicyContent": json.dumps(content)}}
    organizations = SimpleNamespace(describe_effective_policy=lambda PolicyType: answer)  # noqa: N803
    clients: Any = SimpleNamespace(organizations=organizations)
    rules = describe_tag_rules(clients)

    assert find_tag_conflicts(rules, {"Name": "a-head"}) == ([conflict] if conflict else [])


def test_with_a_proxy_only_s3_needs_a_route(line: CommandLine) -> None:
    line.cloud.faults("[network]\ninternet_gateway = false\nacl = 'no-downloads'\n")
    line.cloud.fake.clients.s3.create_bucket(Bucket="team-b")
    proxied = ("--private", "--proxy", "http://10.0.0.9:3128")
    with_bucket = (*proxied, "--bucket", "s3://team-b")

    assert set(examine(line, "--private")[1]) >= {"routes"}
    assert "can't reach S3" in examine(line, *with_bucket)[1]["routes"]["found"]
    assert "can't reach S3" in line.run("up", "--nodes", "1", "--yes", *with_bucket).message
    assert line.cloud.left() == []
    code, bad = examine(line, *proxied)

    assert code == 0
    assert {check: each["verdict"] for check, each in bad.items()}["routes"] == "skipped"
    assert "network ACLs" not in bad


def test_a_role_that_up_creates_is_missing_only_before_the_first_up(
    line: CommandLine, tmp_path: Path
) -> None:
    line.cloud.fake.clients.s3.create_bucket(Bucket="team-b")
    bucket = ("--bucket", "s3://team-b/results")
    assert examine(line, *bucket)[0] == 0
    code, found = examine(line, "--instance-profile", "unknown")
    assert (code, list(found)) == (1, ["purchase"])
    assert "Invalid IAM Instance Profile name" in found["purchase"]["found"]


@pytest.mark.parametrize(
    ("option", "url", "remedy"),
    [
        ("--bucket", "s3://team-b/results", "--bucket s3://team-b/results"),
        (
            "--read-from",
            "s3://team-b/data",
            f"--read-from --permissions-boundary {_BOUNDARY} --region",
        ),
    ],
)
def test_it_judges_what_the_nodes_role_and_a_jump_need(
    line: CommandLine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    url: str,
    remedy: str,
) -> None:
    install_jump_tools(monkeypatch)
    line.cloud.fake.clients.s3.create_bucket(Bucket="team-b")
    assert " not checked, among them ssm:StartSession" in line.must(*_DOCTOR, "--jump", "ssm").out
    enforce(line, tmp_path, without("ec2:DescribeSpotPriceHistory"))

    code, found = examine(line, option, url, "--permissions-boundary", _BOUNDARY)

    assert code == 1
    assert "iam:ListInstanceProfiles" in found["permissions"]["found"]
    assert remedy in found["permissions"]["remedy"]
