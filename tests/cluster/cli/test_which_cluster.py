"""Which cluster a command is about: what this machine knows comes first, then AWS."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from cluster.local_files import ClusterFiles
from infra.aws.cloud import Cloud, open_aws_cloud
from infra.errors import UsageError
from infra.files import write_private
from tests.harness.command_line import CommandLine

_LOCAL = ("--cloud", "local")
_ADDRESSED = ["status", "ssh", "verify", "extend 1h", "repair", "down", "jobs", "fetch"]
_ADDRESSED += ["train squad --demo", "run -- hostname", "bench", "tune squad --demo"]


@pytest.fixture
def no_account(line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without AWS credentials; the embedded cloud works."""
    whole = line.open_cloud

    def open_cloud(name: str, region: str | None, progress: object) -> Cloud:
        return whole(name, region, progress) if name == "local" else open_aws_cloud(region)

    monkeypatch.setattr(line, "open_cloud", open_cloud)


def know(name: str, cloud: str = "local", region: str = "us-east-1", *, key: bool = True) -> None:
    """Have this machine know a cluster that is not there."""
    files = ClusterFiles.of(name)
    files.remember(cloud, region)
    if key:
        write_private(files.key, "key")


def test_before_the_first_up_every_command_says_how_to_begin(
    line: CommandLine, no_account: None
) -> None:
    for argv in _ADDRESSED:
        result = line.run(*argv.split())

        assert result.code == 2
        assert result.message.startswith("no cluster yet\n  → `spr-cluster up --nodes 2` ")
        assert "spr-cluster up --nodes 2 --cloud local" in result.message
        assert "aws configure" in result.message
    assert not line.call_log.calls


def test_a_mistyped_name_gets_the_nearest_one(line: CommandLine, no_account: None) -> None:
    know("tutor")
    for argv in _ADDRESSED:
        verb, *rest = argv.split()
        place = 1 if verb in ("train", "tune") else 0

        result = line.run(verb, *rest[:place], "--name", "tuor", *rest[place:])

        assert result.code == 2
        assert result.message.startswith(
            "this machine knows no cluster 'tuor'; did you mean tutor?\n  → it knows tutor"
        )
        assert "AWS credentials" in result.message
    for options in (["--cloud", "aws"], ["--region", "eu-west-1"]):
        result = line.run("status", "--name", "tuor", *options)
        assert result.message.startswith("no AWS credentials found"), "it may be there"
    assert not line.call_log.calls


def test_without_credentials_the_profile_that_made_a_cluster_is_named(
    line: CommandLine, no_account: None
) -> None:
    ClusterFiles.of("bert").remember("aws", "eu-west-1", account="123456789012", profile="work")

    for words in ("status --name bert", "list", "gc --yes"):
        result = line.run(*words.split())

        assert result.message == (
            f"no AWS credentials found\n  → AWS_PROFILE=work spr-cluster {words}"
        )


def test_a_name_unknown_here_is_searched_on_aws(line: CommandLine) -> None:
    """Another machine may have made it."""
    line.begin("--nodes", "1", "--name", "tutor")
    ClusterFiles.of("tutor").remove()
    know("tutors")

    found = line.must("status", "--name", "tutor")
    missing = line.must("status", "--name", "tutorss")

    assert "Cluster tutor is running" in found.out
    assert "No cluster tutorss in aws us-east-1; did you mean tutors?" in missing.out
    refused = line.run("verify", "--name", "tutorss")
    assert "no cluster 'tutorss' is running in us-east-1; did you mean tutors?" in refused.message


def test_the_only_cluster_is_the_default(line: CommandLine, no_account: None) -> None:
    line.begin("--nodes", "2", *_LOCAL, "--name", "tutor")

    status = line.must("status")
    assert "Cluster tutor is running: 2 of 2 nodes" in status.out
    assert "cluster tutor" in status.err
    assert json.loads(line.must("jobs", "--json").out)["cluster"] == "tutor"
    assert "Nodes of cluster tutor" in line.must("extend", "1h").out
    assert "Up to date" in line.must("repair").out
    assert json.loads(line.must("events", "--json").out)["cluster"] == "tutor"
    line.run("ssh", "node1")
    assert str(ClusterFiles.of("tutor").ssh_config) in line.ssh_calls[0]
    assert line.must("down").out == "Nothing left of cluster tutor.\n"


def test_of_several_clusters_one_must_be_named(line: CommandLine, no_account: None) -> None:
    know("bake-0123", key=False)  # a kept image
    write_private(ClusterFiles.of("x").folder.with_name("Not A Name") / "ssh_config", "Host x\n")
    assert line.run("train", "squad", "--demo").message.startswith("no cluster yet")
    know("tutor")
    assert json.loads(line.must("up", *_LOCAL, "--dry-run", "--json").out)["cluster"] == "spr"
    know("bert", "aws", "eu-west-1")
    before = line.run("status")
    in_one_cloud = line.run("jobs", *_LOCAL)
    sure = line.run("down", "--yes", *_LOCAL)
    know("spr")
    with_spr = line.run("jobs")

    assert before.code == 2
    assert before.message == (
        "which cluster? This machine knows bert (aws eu-west-1) and tutor (local us-east-1)\n"
        "  → --name chooses one"
    )
    assert "no cluster 'tutor' is running" in in_one_cloud.message
    assert (sure.code, sure.message) == (
        2,
        "--yes needs --name: a cluster is never guessed without asking\n"
        "  → this machine knows tutor (local us-east-1)",
    )
    assert "no cluster 'spr' is running" in with_spr.message


def test_messages_repeat_what_this_machine_does_not_know(line: CommandLine) -> None:
    line.begin("--nodes", "2", *_LOCAL, "--name", "tutor")
    known = line.run("ssh", "node1", "--name", "tutor", "--", "lscpu", "-e")
    assert known.code == 0
    assert line.ssh_calls[-1][-3:] == ["node1", "lscpu", "-e"]
    line.lose(line.ids()[0])
    for argv in (["verify"], ["jobs"], ["status"]):
        result = line.run(*argv)
        assert "spr-cluster repair --name tutor" in result.out + result.err
        assert "--cloud" not in result.out + result.err
    ClusterFiles.of("tutor").remove()
    for verb in ("verify", "jobs", "status"):
        result = line.run(verb, "--name", "tutor", *_LOCAL)
        command = "spr-cluster repair --name tutor --cloud local --region us-east-1"
        assert command in result.out + result.err


# `list`


def test_list_shows_what_is_here_without_an_account(line: CommandLine, no_account: None) -> None:
    line.begin("--nodes", "2", *_LOCAL, "--name", "tutor")
    know("bought", "aws", "eu-west-1")

    shown = line.run("list")
    result = json.loads(line.run("list", "--json").out)

    assert shown.code == 2, "a cluster may be running there"
    assert result["not_searched"] == {"aws": "no AWS credentials found"}
    rows = [row.split() for row in shown.out.splitlines()]
    assert rows[0][:4] == ["NAME", "CLOUD", "REGION", "STATE"]
    assert rows[1][:4] == ["tutor", "local", "us-east-1", "running"]
    assert re.search(r"^aws was not searched: no AWS credentials found", shown.err, re.MULTILINE)
    assert "bought" in shown.err
    assert [(c["cluster"], c["cloud"]) for c in result["clusters"]] == [("tutor", "local")]


def test_list_searches_every_place_that_this_machine_knows(line: CommandLine) -> None:
    line.begin("--nodes", "1", "--name", "bert")
    # Whether that region has an image of Ubuntu makes no difference: the cluster is listed.
    line.run("up", "--yes", "--name", "far", "--region", "eu-west-1")

    result = json.loads(line.must("list", "--json").out)

    listed = [(c["cluster"], c["cloud"], c["region"]) for c in result["clusters"]]
    assert sorted(listed) == [("bert", "aws", "us-east-1"), ("far", "aws", "eu-west-1")]
    one_place = json.loads(line.must("list", "--region", "us-east-1", "--json").out)
    assert [c["cluster"] for c in one_place["clusters"]] == ["bert"]


@pytest.mark.parametrize("dead", ["aws", "local"])
def test_list_shows_the_rest_if_a_cloud_does_not_answer(
    line: CommandLine, monkeypatch: pytest.MonkeyPatch, dead: str
) -> None:
    line.begin("--nodes", "1", "--cloud", "local" if dead == "aws" else "aws", "--name", "bert")
    know("tutor", dead)
    whole = line.open_cloud

    def open_cloud(name: str, region: str | None, progress: object) -> Cloud:
        cloud = whole(name, region, progress)
        if (name, dead) == ("local", "local"):
            raise UsageError("the embedded cloud needs root")
        return replace(cloud, endpoint_url="http://127.0.0.1:9") if name == dead else cloud

    monkeypatch.setattr(line, "open_cloud", open_cloud)

    result = line.run("list")

    assert result.code == (1 if dead == "aws" else 2)
    assert "bert" in result.out
    why = "cannot reach AWS" if dead == "aws" else "the embedded cloud needs root"
    assert why in result.message
    assert re.search(f"{dead} was not searched: .*{why}.*; tutor is there", result.err)


def test_gc_finds_clusters_of_the_embedded_cloud_without_an_account(
    line: CommandLine, no_account: None
) -> None:
    line.begin("--nodes", "2", *_LOCAL, "--name", "tutor")

    result = line.must("gc")
    know("bought", "aws", "eu-west-1")
    unsearched = line.run("gc", "--yes")

    for each in (result, unsearched):
        assert each.out == "No forgotten clusters in local.\n"
        assert "aws was not searched" in each.err
    assert unsearched.code == 2
    line.must("down", "--name", "tutor")
    ClusterFiles.of("tutor").remove()
    only_there = line.run("list")
    assert (only_there.code, only_there.out) == (2, "")
