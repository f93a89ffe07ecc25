"""No region is guessed where machines could be bought, and none where clusters could be overlooked."""

from __future__ import annotations

import json

import pytest

from cluster.local_files import ClusterFiles
from tests.harness.command_line import ApiCall, CommandLine

_NO_REGION = (
    "no AWS region is configured\n  → --region us-east-1 selects one, "
    "`aws configure set region us-east-1` sets the default"
)


@pytest.fixture(autouse=True)
def _no_region(line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An AWS configuration with credentials and without a region."""
    monkeypatch.delenv("AWS_REGION")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")


def test_without_a_region_nothing_is_bought_and_nothing_searched(line: CommandLine) -> None:
    for argv in ("up --yes", "up --dry-run", "bake --yes", "status", "down --yes", "images"):
        result = line.run(*argv.split())
        assert (result.code, result.message) == (2, _NO_REGION), argv
    for argv in ("list", "gc --yes"):
        result = line.run(*argv.split())
        assert result.code == 2
        assert "--all-regions searches all of them, --region us-east-1" in result.message

    assert not line.call_log.calls


def test_on_a_terminal_the_region_is_asked_for(
    line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.cli.chosen_cluster.has_terminal", lambda: True)
    monkeypatch.setattr("sys.stdin.readline", lambda: "us-east-1\n", raising=False)

    result = line.must("up", "--dry-run", "--json")

    assert "AWS region, such as us-east-1: " in result.err
    assert json.loads(result.out)["region"] == "us-east-1"


def test_credentials_that_expire_during_up_end_it_cleanly(line: CommandLine) -> None:
    bought: list[str] = []

    def expire(call: ApiCall) -> None:
        if bought:
            rule = "action = '*'\ncode = 'ExpiredToken'\nmessage = 'The token is expired'\ntimes = 9999\n"
            line.cloud.faults(f"[[error]]\n{rule}")
        elif call.action == "ec2:RunInstances":
            bought.append(call.action)

    line.call_log.before.append(expire)

    result = line.run("up", "--nodes", "2", "--yes", "--region", "us-east-1")

    # Exit code 2 would claim that nothing was changed.
    assert result.code == 1
    assert result.message.startswith("AWS rejected the credentials: The token is expired\n  → ")
    text = " ".join(result.err.split())
    assert "To continue: spr-cluster up --name spr" in text
    assert f"This command bought {', '.join(line.ids())}, which cost money until they end." in text
    assert "Traceback" not in result.err
    line.call_log.before.clear()
    line.cloud.faults("")
    assert ClusterFiles.of("spr").key.exists()
    # What is known here needs no region.
    line.must("up", "--yes")
    assert len(line.ids()) == 2
    listed = json.loads(line.must("list", "--json").out)["clusters"]
    assert [cluster["cluster"] for cluster in listed] == ["spr"]
    assert line.must("list", "--all-regions").code == 0
    assert line.must("down", "--yes").out == "Nothing left of cluster spr.\n"
