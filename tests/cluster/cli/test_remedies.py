"""Printed remedies, followed to the letter: each cures the fault that prints it.

A row is a fault, the command that reports it, and the printed remedy, which a pattern finds in the message.
It is then run: our own commands in this process, `chmod` for real, and calls of the AWS command line through
boto3. After that, the command must succeed.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import dataclass

import pytest

from tests.harness import failures as f
from tests.harness.command_line import CommandLine

_UP = "up --nodes 2 --yes"
_PLAN = "up --nodes 2 --dry-run"
_OURS = r"`?(spr-cluster {}[^`,;\n]*)"


@dataclass(frozen=True)
class Remedy:
    """``cured`` is the command that then works, if it is not ``argv``."""

    name: str
    argv: str
    remedy: str
    act: f.Act = f.nothing
    exists: bool = True
    cured: str = ""


def lose_all(line: CommandLine) -> None:
    line.cloud.fake.backend.terminate_instances(line.ids())
    line.cloud.clock.now += 3600


_PAST = f.record("expires", "2020-01-01T00:00:00Z")
_VPC = r"`(aws ec2 create-default-vpc [^`]+)"
_TWO_PARTS = "iam-policy --second-guard --bucket s3://models"
_FAST = f"{_UP} --volume-throughput 1000"
_TABLE = (
    Remedy("no cluster", "verify", _OURS.format("up"), exists=False),
    Remedy("key open to others", "verify", r"→ (chmod 600 .+)", f.open_key),
    Remedy("key lost", "verify", _OURS.format("down"), f.lose_key, cured=_UP),
    Remedy("key damaged", "repair --yes", _OURS.format("down"), f.damage_key, cured=_PLAN),
    Remedy("nodes lost", "verify", _OURS.format("up"), lose_all),
    Remedy("record damaged", _UP, _OURS.format("down"), f.record("nodes", "many")),
    Remedy("time over", _UP, _OURS.format("extend 2h"), _PAST),
    Remedy("other stack", "up --stack intel --yes", _OURS.format("down"), cured=_PLAN),
    Remedy("no image", "images --delete ami-1", r"(spr-cluster images)", cured="images"),
    Remedy("no default VPC", _UP, _VPC, f.remove_default_vpc, exists=False),
    Remedy("no terminal", "down", r"(--yes) confirms"),
    Remedy("a zone", "list --region us-east-1a", r"(--region us-east-1)$"),
    Remedy("a short life", f"{_UP} --ttl 5m", r"(--ttl \w+) or more", exists=False),
    Remedy("few operations", _FAST, r"add (--volume-iops \d+)", exists=False),
    Remedy("a long policy", _TWO_PARTS, r"add (--part 1)", exists=False),
    Remedy("no AMX", f"{_UP} --instance-type c6i.metal", r"(--allow-no-amx) allows", exists=False),
    Remedy("no such command", "config upp", r"such as: (spr-cluster config up)", cured="config up"),
    Remedy("no text", "predict", r"(spr-cluster predict --help)", cured="predict --help"),
)


def follow(line: CommandLine, remedy: str) -> None:
    """Do what the message says."""
    program, *words = shlex.split(remedy)
    if program == "spr-cluster":
        line.must(*words, *(["--yes"] if words[0] in ("up", "down") else []))
    elif program == "aws":
        service, call, *options = words
        given = {o.lstrip("-"): v for o, v in zip(options[::2], options[1::2], strict=True)}
        client = line.cloud.ctx.clients.ec2
        assert (service, given.pop("region")) == ("ec2", client.meta.region_name)
        getattr(client, call.replace("-", "_"))()
    else:
        assert program == "chmod"
        subprocess.run([program, *words], check=True, capture_output=True, timeout=10)


@pytest.mark.parametrize("row", _TABLE, ids=lambda row: row.name)
def test_a_printed_remedy_cures_its_fault(line: CommandLine, row: Remedy) -> None:
    if row.exists:
        line.begin("--nodes", "2")
    row.act(line)
    failed = line.run(*shlex.split(row.argv))
    assert failed.code != 0, failed.out
    found = re.search(row.remedy, failed.message)
    assert found, failed.message

    added = found[1].split() if found[1].startswith("--") else []
    if not added:
        follow(line, found[1])

    # Of an option that is given twice, the last one counts.
    cured = line.run(*shlex.split(row.cured or row.argv), *added)
    assert cured.code == 0, f"{failed.message}\n{found[1]}\n{cured.err}"
