"""This machine's address changes: every command that uses SSH offers to allow the new one."""

from __future__ import annotations

import pytest

from infra.local.api.requests import READS
from tests.harness.cloud import CALLER
from tests.harness.command_line import CommandLine

OTHER = "198.51.100.9/32"
CHANGED = f"this machine's address changed from {CALLER} to {OTHER}"


@pytest.fixture
def moved(line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """A cluster whose owner has got another address."""
    line.begin("--nodes", "2")
    line.cloud.network.caller = OTHER
    monkeypatch.setattr("cluster.cli.ssh.shutil.which", lambda _: "/usr/bin/ssh")
    return line


def answer(monkeypatch: pytest.MonkeyPatch, *, yes: bool) -> list[str]:
    """Be at a terminal; returns the questions."""
    questions: list[str] = []

    def reply(question: str) -> bool:
        questions.append(question)
        return yes

    for module in ("chosen_cluster", "status"):
        monkeypatch.setattr(f"cluster.cli.{module}.ask", reply)
    return questions


def rule(line: CommandLine) -> list[str]:
    groups = line.cloud.ec2.describe_security_groups(
        Filters=[{"Name": "group-name", "Values": ["spr-cluster-spr"]}]
    )["SecurityGroups"]
    return [r["CidrIp"] for p in groups[0]["IpPermissions"] for r in p.get("IpRanges", [])]


def test_without_a_terminal_the_command_that_allows_it_is_named(moved: CommandLine) -> None:
    for command in ("jobs", "verify", "cancel"):
        result = moved.run(command)
        assert result.code == 1
        assert CHANGED in result.out + result.err
    assert f"{CHANGED}. To allow it: spr-cluster up --name spr" in moved.must("status").out
    assert rule(moved) == [CALLER]


@pytest.mark.parametrize("command", ["jobs", "verify --no-bandwidth", "status", "cancel"])
def test_on_a_terminal_it_is_allowed_with_one_word(
    moved: CommandLine, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    questions = answer(monkeypatch, yes=True)

    moved.must(*command.split())

    assert questions == [f"{CHANGED}; allow it?"]
    assert rule(moved) == [OTHER]


def test_ssh_tries_again_only_after_the_rule_was_repaired(
    moved: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved.ssh_code = lambda: 0 if rule(moved) == [OTHER] else 255
    refused = moved.run("ssh")
    assert (refused.code, len(moved.ssh_calls)) == (255, 1)
    assert f"{CHANGED}. To allow it: spr-cluster up --name spr" in refused.err
    questions = answer(monkeypatch, yes=True)

    assert moved.run("ssh", "node1").code == 0
    assert len(moved.ssh_calls) == 3
    assert len(questions) == 1


def test_ssh_never_runs_a_command_twice(
    moved: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenSSH's exit code may also mean that the connection broke after the command had begun."""
    answer(monkeypatch, yes=True)
    moved.ssh_code = lambda: 255

    result = moved.run("ssh", "node1", "--", "sudo", "reboot")

    assert result.code == 255
    assert len(moved.ssh_calls) == 1
    assert rule(moved) == [OTHER]
    assert "SSH is open again; run the command again" in result.err


def test_where_ssh_works_nothing_is_looked_up(
    line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.begin("--nodes", "2")
    monkeypatch.setattr(line.cloud.network, "caller_cidr", lambda: pytest.fail("looked up"))
    monkeypatch.setattr(line.cloud.network, "why_closed", lambda *_: "")
    line.call_log.calls.clear()

    line.must("jobs")

    actions = [call.action for call in line.call_log.calls]
    assert all(action.partition(":")[2].startswith(READS) for action in actions)
    assert actions.count("ec2:DescribeSecurityGroups") == 1
