"""Messages for requests that can't be met: the whole message, and nothing done.

Each row is a command line and the message that it must have, word for word; where Python's own words
differ between its versions, a pattern.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.aws.cloud import open_aws_cloud
from provision.stacks.load import shipped_names
from tests.harness import failures as f
from tests.harness.command_line import CommandLine, numbered
from tests.infra.local.fakes import Endpoint

_NAME = "expected at most 32 lowercase letters, digits, and hyphens, starting with a letter"
_DURATION = "expected a duration such as 90m, 8h, or 2d"
_NODES = "expected a whole number from 1 to 256"
_PRICE = "expected US dollars per machine and hour, above 0 and at most 1000"
_CIDR = (
    "\n  → use ranges such as 203.0.113.7/32 or 2001:db8::7/128, separated by commas, or auto for this "
    "machine's address"
)
_NO_NETWORK = "is not an IPv4 or IPv6 range"
_TYPES = (
    "\n  → families with AMX: r7iz, c7i, m7i, r7i, c8i, m8i, r8i, c8id, m8id, r8id, i7i, i7ie, x8i, "
    "c7i-flex, m7i-flex, c8i-flex, m8i-flex, r8i-flex; `spr-cluster types` compares them"
)
_REGIONS = (
    "\n  → `aws account list-regions` lists this account's regions; "
    "if this is a new one, check the network connection"
)
_YES = re.compile(
    r"this needs confirmation, but there is no terminal: \$13\.13 an hour, at most \$111\.5\d "
    r"\(Price List API, [\d-]{10}\)\n  → --yes confirms"
)
_NO_CLUSTER = (
    "no cluster 'spr' is running in us-east-1\n  → `spr-cluster up "
    f"{f.NEW_FLAGS}` creates one; --name, --cloud, and --region choose another"
)


_ROWS: tuple[tuple[str, f.Message], ...] = (
    # Which cluster
    ("up --name 'My Cluster'", f"--name My Cluster: {_NAME}"),
    ("up --name 9a", f"--name 9a: {_NAME}"),
    ("up --name é", f"--name é: {_NAME}"),
    ("repair --name A", f"--name A: {_NAME}"),
    ("status --name a/b", f"--name a/b: {_NAME}"),
    ("ssh --name a.b", f"--name a.b: {_NAME}"),
    ("extend 2h --name A", f"--name A: {_NAME}"),
    ("down --name A --yes", f"--name A: {_NAME}"),
    ("train squad --demo --name A", f"--name A: {_NAME}"),
    ("down --name '' --yes", "--name" + f.EMPTY),
    # Where
    (
        "up --cloud azure",
        f.choice("argument --cloud: invalid choice: 'azure'", "up", "aws", "local"),
    ),
    (
        "list --cloud gcp",
        f.choice("argument --cloud: invalid choice: 'gcp'", "list", "aws", "local"),
    ),
    (
        "up --region us-est-1",
        f"unknown region 'us-est-1'; did you mean us-west-1 or us-east-1?{_REGIONS}",
    ),
    ("status --region mars", f"unknown region 'mars'{_REGIONS}"),
    (
        "list --region us-east-1a",
        "--region us-east-1a: this is a zone\n  → use its region: --region us-east-1",
    ),
    ("gc --region ''", "--region" + f.EMPTY),
    # What: how many, of which type, where
    ("up --nodes 257", f"--nodes 257: {_NODES}"),
    ("up --nodes 99999999999999999999", f"--nodes 99999999999999999999: {_NODES}"),
    ("up --nodes two", "argument --nodes: invalid int value: 'two'" + f.help_of("up")),
    ("up --nodes", "argument --nodes: expected one argument" + f.help_of("up")),
    ("up --instance-type c7i.metal-24xl,nonsense", "unknown instance type 'nonsense'" + _TYPES),
    (
        "up --instance-type r7iz.metal.16xl",
        "unknown instance type 'r7iz.metal.16xl'; did you mean r7iz.metal-16xl or r7iz.metal-32xl or "
        f"r8i.metal-96xl?{_TYPES}",
    ),
    ("ssh --json", "unknown option '--json'" + f.help_of("ssh")),
    (
        "ssh --setup node1",
        "--setup, --remove-setup, and --authorize take no node and no command",
    ),
    ("ssh node1 --nme x", "unknown option '--nme'; did you mean --name?" + f.help_of("ssh")),
    (
        "up --instance-type ,",
        "--instance-type '': expected 1 to 12 EC2 types separated by commas",
    ),
    ("up --instance-type ''", "--instance-type" + f.EMPTY),
    (
        "up --stack tensorflow",
        f"unknown stack 'tensorflow': one of {', '.join(shipped_names())}"
        "\n  → your own stacks are read from spr-cluster.toml in the working folder or above",
    ),
    (
        "stacks --check tensorflow --lock",
        f"unknown stack 'tensorflow': one of {', '.join(shipped_names())}"
        "\n  → your own stacks are read from spr-cluster.toml in the working folder or above",
    ),
    ("stacks --timeout 60", "--timeout requires --check"),
    ("stacks --isolated", "--isolated requires --check"),
    ("stacks --check intel --lock --timeout 0", "--timeout 0: expected seconds, more than 0"),
    ("up --bake worker", "--bake worker: expected head or none"),
    ("bake --stack ''", "--stack" + f.EMPTY),
    ("images ami-0", "IMAGE requires --delete"),
    ("images --yes", "--yes requires --delete"),
    ("bake --own-torch", "--own-torch requires --packages"),
    (
        "iam-policy --check --part 1",
        "argument --part: not allowed with argument --check" + f.help_of("iam-policy"),
    ),
    (
        "ssh --setup --remove-setup",
        "argument --remove-setup: not allowed with argument --setup" + f.help_of("ssh"),
    ),
    ("images --delete", "expected the IDs of images, or --unused"),
    ("images --delete ami-0 --unused", "expected the IDs of images, or --unused"),
    ("up --volume-gib 19", "--volume-gib 19: expected from 20 to 16384 GiB"),
    ("up --volume-gib 16385", "--volume-gib 16385: expected from 20 to 16384 GiB"),
    ("up --volume-gib big", "argument --volume-gib: invalid int value: 'big'" + f.help_of("up")),
    ("up --subnet-id ''", "--subnet-id" + f.EMPTY),
    (
        "bake --subnet-id 'subnet-\x01'",
        "--subnet-id 'subnet-\\x01': expected an ID such as subnet-0123456789abcdef0, or up to 10 "
        "separated by commas",
    ),
    (
        "up --subnet-id subnet-0 --yes",
        "--subnet-id subnet-0: no such subnet in us-east-1\n  → `aws ec2 describe-subnets "
        "--region us-east-1` lists them; without --subnet-id, the default VPC is used",
    ),
    # For how long, for how much
    ("up --ttl forever", f"--ttl 'forever': {_DURATION}"),
    ("up --ttl 8", f"--ttl '8': {_DURATION}"),
    ("up --ttl 30s", f"--ttl '30s': {_DURATION}"),
    ("up --ttl 0m", "--ttl 0m: expected from 1m to 30d"),
    (
        "up --ttl 5m --yes",
        "the time to live is only 5 min: bare metal may take that long to start\n  → new cluster: "
        f"--ttl 30m or more; existing cluster: spr-cluster extend 2h {f.NEW_FLAGS}",
    ),
    ("up --ttl 999999999999999999d", "--ttl 999999999999999999d: expected at most 30d"),
    ("up --idle-timeout soon", f"--idle-timeout 'soon': {_DURATION}"),
    ("up --idle-timeout 1m", "--idle-timeout 1m: expected from 5m to 30d"),
    ("up --idle-timeout 31d", "--idle-timeout 31d: expected from 5m to 30d"),
    ("up --max-price 3", "--max-price requires --market spot; on-demand prices are fixed"),
    ("up --market spot --max-price -1", f"--max-price -1: {_PRICE}"),
    ("up --market spot --max-price 1001", f"--max-price 1001: {_PRICE}"),
    (
        "up --market spot --max-price much",
        "argument --max-price: invalid float value: 'much'" + f.help_of("up"),
    ),
    # Who may enter
    ("up --ssh-cidr 1.2.3.4/33", f"--ssh-cidr: '1.2.3.4/33' {_NO_NETWORK}{_CIDR}"),
    (
        "up --ssh-cidr 203.0.113.7/24",
        f"--ssh-cidr: '203.0.113.7/24' {_NO_NETWORK}; did you mean 203.0.113.0/24?{_CIDR}",
    ),
    ("up --ssh-cidr auto,", f"--ssh-cidr: '' {_NO_NETWORK}{_CIDR}"),
    ("repair --ssh-cidr me", f"--ssh-cidr: 'me' {_NO_NETWORK}{_CIDR}"),
    ("up --ssh-cidr ''", "--ssh-cidr" + f.EMPTY),
    # What is not there
    ("up --bogus", "unknown option '--bogus'" + f.help_of("up")),
    ("up --node 2", "unknown option '--node'; did you mean --nodes?" + f.help_of("up")),
    ("repair --nodes 3", "unknown option '--nodes'" + f.help_of("repair")),
    ("list --all", "unknown option '--all'; did you mean --all-regions?" + f.help_of("list")),
    (
        "gc --all-region",
        "unknown option '--all-region'; did you mean --all-regions?" + f.help_of("gc"),
    ),
    ("status extra", "unknown argument 'extra'" + f.help_of("status")),
    ("fly", "unknown command 'fly'\n  → spr-cluster --help"),
    (
        "repair",
        f"no cluster 'spr' in aws us-east-1\n  → `spr-cluster up {f.NEW_FLAGS}` creates one, "
        "`spr-cluster list` shows all clusters",
    ),
    ("ssh", _NO_CLUSTER),
    ("ssh node7 -- hostname", _NO_CLUSTER),
    ("extend 2h", _NO_CLUSTER),
    ("verify", _NO_CLUSTER),
    ("train squad --demo", _NO_CLUSTER),
    ("jobs", _NO_CLUSTER),
    ("fetch", _NO_CLUSTER),
    ("up --nodes 2", _YES),
    # How much longer
    ("extend", "the following arguments are required: time" + f.help_of("extend")),
    ("extend ''", "time" + f.EMPTY),
    ("extend 0", f"extend '0': {_DURATION}"),
    ("extend '2 hours'", f"extend '2 hours': {_DURATION}"),
    ("extend 0h", "extend 0h: expected from 1m to 30d"),
    ("extend 31d", "extend 31d: expected from 1m to 30d"),
)


@pytest.fixture(scope="module")
def line(endpoint: Endpoint) -> Iterator[CommandLine]:
    with f.one_for_all(endpoint) as line:
        yield line


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("argv", "message"), _ROWS, ids=numbered(row[0] for row in _ROWS))
def test_a_usage_error_names_what_is_expected(
    line: CommandLine, argv: str, message: f.Message
) -> None:
    f.expect_refusal(line, shlex.split(argv), message)


_NOT_ENABLED = (
    "→ if `aws sts get-caller-identity --region us-east-1` works, your account has not enabled this "
    "region (in the console: Account, AWS Regions); otherwise: "
)
_CREDENTIALS_HINT = (
    "\n  → run `aws configure`, `aws login`, or `aws sso login`, or set AWS_PROFILE; to try the tool "
    "without an account: --cloud local"
)


@pytest.mark.parametrize(
    "verb",
    [
        "up --yes",
        "up --dry-run",
        "status --cloud aws",
        "down --yes --region us-east-1",
        "list --cloud aws",
        "gc",
    ],
)
def test_missing_credentials_are_reported_by_every_command(
    line: CommandLine, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setattr(line, "open_cloud", lambda name, region, _: open_aws_cloud(region))
    monkeypatch.setattr("infra.aws.cloud.find_caller_cidr", lambda: "203.0.113.7/32")
    f.expect_refusal(line, verb.split(), "no AWS credentials found" + _CREDENTIALS_HINT)
    if verb == "gc":  # nobody expects clusters where no account is set up
        listed = line.must("list")
        assert listed.out == "No clusters were made on this machine.\n"
        assert "aws was not searched: no AWS credentials found" in listed.err


def test_a_missing_profile_is_named(line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "work")
    f.expect_refusal(
        line,
        ["status"],
        re.compile(
            r"AWS configuration can't be used: .*\(work\).*\n.*`aws configure --profile work`.*"
        ),
    )


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("ExpiredToken", "The security token included in the request is expired"),
        ("RequestExpired", "Request has expired."),
        ("AuthFailure", "AWS was not able to validate the provided access credentials"),
    ],
)
def test_rejected_credentials_are_reported(line: CommandLine, code: str, text: str) -> None:
    line.cloud.faults(f"[[error]]\ncode = '{code}'\nmessage = '{text}'\ntimes = 100\n")
    try:
        hint = _CREDENTIALS_HINT
        if code == "AuthFailure":
            hint = hint.replace("→ ", _NOT_ENABLED)
        message = f"AWS rejected the credentials: {text}{hint}"
        f.expect_refusal(line, ["up", "--nodes", "2", "--yes"], message)
    finally:
        line.cloud.faults("")
