"""`make aws-check` from end to end: its AWS is a second embedded cloud, on HTTP."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import botocore.session
import pytest
from botocore import xform_name

from infra.aws.clients import Clients, connect
from infra.ec2.inventory import describe_inventories
from infra.iam.policy import build_policy
from infra.instance_types import INSTANCE_TYPES
from tests.aws_check import __main__ as program
from tests.aws_check import facts, sides
from tests.aws_check.check import check_facts, compare_structures
from tests.aws_check.probes import DRY_RUNS, READS
from tests.aws_check.report import Report, Row, mask
from tests.aws_check.sides import Opener, Side, ask, open_aws, open_embedded
from tests.aws_check.structures import Structures
from tests.harness.cloud import make_cloud
from tests.harness.command_line import CommandResult
from tests.infra.local.fakes import Endpoint


@pytest.fixture(autouse=True)
def _one_endpoint(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port and clients take half a second to make."""
    monkeypatch.setattr(endpoint, "close", lambda: None)
    monkeypatch.setattr(sides, "Endpoint", lambda: endpoint)


@functools.cache
def http_clients(url: str) -> Clients:
    return connect(make_cloud(url))


def another_cloud(faults: str = "", **changes: Any) -> Opener:
    """A second embedded cloud as AWS: an account of its own, asked over HTTP."""

    @contextmanager
    def open_cloud(_region: str) -> Iterator[Side]:
        with open_embedded(faults) as side:
            url = side.client("sts").meta.endpoint_url
            yield replace(side, name="AWS", clients=http_clients(url), **changes)

    return open_cloud


@pytest.fixture
def report(tmp_path: Path) -> Path:
    return tmp_path / "aws-check.json"


def run(report: Path, *options: str, target: Opener | None = None) -> int:
    return program.main(
        ["--region", "us-east-1", "--output", str(report), *options], target or another_cloud()
    )


def rows_of(report: Path) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(report.read_text())["checks"]}


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four calls and no commands are enough."""
    names = ("unknown instance", "unknown subnet", "dry run: volume that is gone", "spot quota")
    probes = [probe for probe in (*READS, *DRY_RUNS) if probe.name in names]
    assert len(probes) == 4
    monkeypatch.setattr(program, "_PROBES", probes)
    monkeypatch.setattr(program, "_COMMANDS", ())


def test_equal_clouds_do_not_differ_and_nothing_is_left(
    report: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left: list[Any] = []

    @contextmanager
    def target(region: str) -> Iterator[Side]:
        with another_cloud()(region) as side:
            yield replace(side, run=only(side, train=0))
            left.append(describe_inventories(side.clients.ec2))

    code = run(report, "--spend", "--yes", "--all", target=target)

    printed = capsys.readouterr().out
    content, found = json.loads(report.read_text()), rows_of(report)
    assert (code, content["complete"], left) == (0, True, [{}, {}])
    assert {row["verdict"] for row in found.values()} == {"same", "note"}
    commands = [name.split()[1] for name in found if name.startswith("spr-cluster ")]
    life = ["up", "status", "train", "repair", "(the", "down"]
    assert commands == ["up", "up", "list", *life]
    assert found["answer of ec2:RunInstances"]["verdict"] == "same"
    assert found["alive: a rule twice"]["aws"] == "InvalidPermission.Duplicate 400"
    assert found["nothing is left"]["verdict"] == "same"
    assert found["instance types"]["verdict"] == "same"
    assert f"{len(found)} checks" in printed
    assert not re.search(
        r"\b\d{12}\b|-[0-9a-f]{17}\b|\b172\.\d+\.\d+\.\d+", printed + report.read_text()
    )


@pytest.mark.usefixtures("few")
def test_a_difference_ends_with_1_and_what_the_account_may_not_do_is_skipped(
    report: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = "[[error]]\naction = 'DescribeSubnets'\ncode = 'InvalidSubnet'\nmessage = 'i-0123456789abcdef0'"

    assert run(report, target=another_cloud(fault)) == 1

    rows = rows_of(report)
    assert [name for name, row in rows.items() if row["verdict"] == "differs"] == ["unknown subnet"]
    printed = capsys.readouterr().out
    assert "embedded: InvalidSubnetID.NotFound 400; AWS: InvalidSubnet 400" in printed
    assert "AWS says: <id>\n" in printed

    policy = tmp_path / "policy.json"
    actions = ["sts:*", "ec2:DescribeInstances", "ec2:DescribeInstanceTypes", "ec2:DescribeRegions"]
    statement = {"Effect": "Allow", "Action": actions, "Resource": "*"}
    policy.write_text(json.dumps({"Statement": [statement]}))
    assert run(report, target=another_cloud(f"[iam]\npolicy = '{policy}'\n")) == 0
    found = rows_of(report).items()
    skipped = {name: row["details"] for name, row in found if row["verdict"] == "skipped"}
    assert skipped["unknown subnet"] == ["not allowed: ec2 describe_subnets"]
    assert skipped["spot quota"] == ["not allowed: service-quotas get_service_quota"]
    assert skipped["prices in us-east-1"] == ["not allowed: GetProducts"]
    assert "dry run: volume that is gone" in skipped


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("failure", "ran", "code"),
    [
        ({"doctor": 1}, ["doctor"], 2),
        ({"up": 1, "down": 1}, ["doctor", "up", "down", "down"], 1),
        ({"up": 130}, ["doctor", "up", "down"], 130),
    ],
)
def test_after_a_failure_or_ctrl_c_nothing_is_left_and_what_was_seen_is_shown(
    report: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    failure: dict[str, int],
    ran: list[str],
    code: int,
) -> None:
    left, commands = list[Any](), list[str]()

    @contextmanager
    def target(region: str) -> Iterator[Side]:
        with another_cloud()(region) as side:
            yield replace(side, run=only(side, commands, **{"doctor": 0, **failure}))
            left.append(describe_inventories(side.clients.ec2))

    @contextmanager
    def open_without_life() -> Iterator[Side]:
        with open_embedded() as side:
            yield replace(side, run=only(side, up=1, down=0))

    monkeypatch.setattr(program, "open_embedded", open_without_life)
    assert run(report, "--spend", "--yes", target=target) == code

    assert (commands, any(left)) == (ran, False)
    if code == 130:
        assert json.loads(report.read_text())["complete"] is False
        assert rows_of(report)["unknown subnet"]["verdict"] == "same"
    err, hint = (
        capsys.readouterr().err,
        r"if this is interrupted: spr-cluster down --name aws-check-\w+ --yes",
    )
    assert bool(re.search(hint, err)) is ("down" in ran)


def only(side: Side, ran: list[str] | None = None, /, **codes: int) -> Callable[..., CommandResult]:
    """Run commands as this side does, and end some at once with these codes."""

    def run(*argv: str) -> CommandResult:
        if ran is not None:
            ran.append(argv[0])
        if argv[0] in codes:
            code = codes[argv[0]]
            return CommandResult(code, "", f"spr-cluster: {code}" if code else "")
        return side.run(*argv)

    return run


_HERE = ["--region", "us-east-1"]


@pytest.mark.parametrize(
    ("options", "url", "message"),
    [
        ([], "", "--region is missing"),
        (_HERE, "", "no AWS credentials found"),
        (["--region", "nowhere"], "", "unknown region 'nowhere'"),
        (_HERE, "http://127.0.0.1:9", "AWS_ENDPOINT_URL is set: that is not AWS"),
        ([*_HERE, "--spend"], "", "this needs confirmation"),
    ],
)
def test_what_cannot_run_says_why_in_one_line(
    options: list[str],
    url: str,
    message: str,
    report: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)

    assert program.main([*options, "--output", str(report)], open_aws) == 2

    assert capsys.readouterr().err.startswith(f"aws-check: {message}")
    assert not report.exists()


def test_without_spending_every_call_reads_or_is_dry_and_each_change_is_tried() -> None:
    actions = {a for s in build_policy()["Statement"] for a in s["Action"]}
    model = botocore.session.get_session().get_service_model("ec2")
    names = [a[4:] for a in actions if re.match("ec2:(?!Describe|Get)", a)]
    inputs: dict[str, Any] = {n: model.operation_model(n).input_shape for n in names}
    dry = {xform_name(name) for name, shape in inputs.items() if "DryRun" in shape.members}
    assert dry <= {probe.operation for probe in DRY_RUNS}
    assert all(probe.operation.startswith(("describe_", "get_")) for probe in READS)

    with open_embedded() as side:
        for probe in DRY_RUNS:
            parameters = probe.parameters(side)
            assert parameters["DryRun"] is True
            assert ask(side, probe.service, probe.operation, parameters).code, probe.name


def test_a_wrong_claim_about_a_type_or_a_price_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    types = {name: INSTANCE_TYPES[name] for name in ("c7i.xlarge", "m7i.xlarge")}
    types["c7i.xlarge"] = replace(types["c7i.xlarge"], memory_gib=9)
    monkeypatch.setattr(facts, "INSTANCE_TYPES", types)
    usd = {"pricePerUnit": {"USD": "0.2016000000"}}
    product = json.dumps({"terms": {"OnDemand": {"t": {"priceDimensions": {"d": usd}}}}})
    pricing = SimpleNamespace(get_products=lambda **_: {"PriceList": [product]})

    with open_embedded() as side:
        monkeypatch.setattr(side, "client", lambda _service: pricing)
        rows = {row.name: row for row in check_facts(side, facts.FACTS)}

    assert rows["instance types"].verdict == "differs"
    assert rows["instance types"].details == ("c7i.xlarge: memory_gib is 8.0, not 9",)
    assert rows["prices in us-east-1"].details == ("c7i.xlarge: $0.2016 an hour, not $0.1785",)


def test_elements_that_the_product_reads_matter_and_others_are_counted() -> None:
    ours, theirs = Structures(), Structures()
    both = {"Xs[].State": {"pending"}}
    only_ours: dict[str, set[str]] = {"Xs[].VpcId": set(), "Xs[].Tags[].Key": set()}
    ours.seen["ec2:DescribeX"] = {**only_ours, **both, "Xs[].Colour": set()}
    only_theirs: dict[str, set[str]] = {"Xs[].InstanceId": set(), "Xs[].Flavour": set()}
    theirs.seen["ec2:DescribeX"] = {**only_theirs, "Xs[].State": {"new"}}

    (row,) = compare_structures(ours, theirs)

    assert row.verdict == "differs"
    assert row.details == (
        "AWS does not show Xs[].VpcId",
        "the embedded cloud does not show Xs[].InstanceId",
        "only embedded: Xs[].Colour",
        "new values: Xs[].State: new",
        "only AWS: 1 elements that the product does not read: Xs[].Flavour",
    )


def test_what_identifies_an_account_is_masked(report: Path) -> None:
    text = (
        "arn:aws:iam::123456789012:user/ann of 123456789012 at 203.0.113.7/32 and 2001:db8::1:2:3 runs "
        "i-0123456789abcdef0 of subnet-01234567, key AKIAIOSFODNN7EXAMPLE; us-east-1 c7i.xlarge 1.44.5"
    )
    clean = "<arn> of <account> at <address> and <address> runs <id> of <id>, key <key>; "
    clean += "us-east-1 c7i.xlarge 1.44.5"
    assert mask(text) == clean
    Report("us-east-1", {}, [Row("name", text, "note", details=(text,))]).write(report)
    assert rows_of(report)["name"]["details"] == [clean]
    assert "AKIA" not in report.read_text()
