"""Whose account, and whose cluster: a command that is wrong about either changes nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.local_files import ClusterFiles
from infra.aws.cloud import Cloud, open_aws_cloud
from infra.ec2.inventory import Inventory
from tests.harness.command_line import CommandLine, files_at_home
from tests.infra.local.fakes import CREDENTIALS

OTHER = "210987654321"
_OTHER_ACCOUNT = f'account = "{OTHER}"\n'
_ANN = "arn:aws:iam::123456789012:user/spr-cluster"
_BOB = 'caller = "user/bob"\n'
_BOBS_ARN = "arn:aws:iam::123456789012:user/bob"
_ADDRESSED = (
    "status",
    "down --yes",
    "extend 2h",
    "repair --yes",
    "up --yes",
    "up --dry-run",
    "ssh",
    "verify",
)
_UP = ("up", "--nodes", "2", "--yes")


@pytest.fixture
def profiles(line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The credentials are those of a profile of the AWS configuration: work, or home."""
    key, secret = CREDENTIALS
    access = f"aws_access_key_id = {key}\naws_secret_access_key = {secret}\nregion = us-east-1\n"
    (tmp_path / "aws").write_text(f"[profile work]\n{access}[profile home]\n{access}")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws"))
    monkeypatch.setenv("AWS_PROFILE", "work")

    def open_cloud(_name: str, region: str | None, _progress: object) -> Cloud:
        here = replace(open_aws_cloud(region), caller_cidr=lambda: line.cloud.network.caller)
        return replace(here, endpoint_url=line.cloud.fake.endpoint.url)

    monkeypatch.setattr(line, "open_cloud", open_cloud)
    line.clients.clear()


# The account


def test_another_accounts_credentials_are_refused(
    line: CommandLine, profiles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.must(*_UP)
    before, machines = files_at_home(), line.ids()
    line.call_log.calls.clear()
    monkeypatch.setenv("AWS_PROFILE", "home")
    line.cloud.faults(_OTHER_ACCOUNT)

    for argv in _ADDRESSED:
        result = line.run(*argv.split())
        assert result.code == 2
        assert result.message == (
            "cluster 'spr' was made in AWS account 123456789012 (profile work), but these credentials "
            f"belong to account {OTHER} (profile home)\n  → AWS_PROFILE=work spr-cluster {argv}"
        )
    assert {seen.action for seen in line.call_log.calls} == {"sts:GetCallerIdentity"}
    assert len(line.call_log.calls) == len(_ADDRESSED)
    assert files_at_home() == before
    assert line.ids() == machines


def test_list_shows_the_account_and_what_is_in_another(line: CommandLine) -> None:
    line.begin("--nodes", "2")
    shown, found = line.must("list"), json.loads(line.must("list", "--json").out)
    line.cloud.faults(_OTHER_ACCOUNT)
    elsewhere = line.must("list")

    assert "aws: account 123456789012\n" in shown.out
    assert found["accounts"] == {"aws": "123456789012"}
    assert elsewhere.out == f"No clusters in aws, us-east-1, account {OTHER}.\n"
    assert f"spr is in account 123456789012, not in {OTHER}\n" in elsewhere.err


def test_gc_in_another_account_keeps_the_key_of_a_cluster_with_the_same_name(
    line: CommandLine,
) -> None:
    line.begin("--nodes", "2")
    key = ClusterFiles.of("spr").key.read_text()
    line.cloud.faults(_OTHER_ACCOUNT)
    ec2 = line.cloud.fake.ec2
    kinds = [
        {"ResourceType": "security-group", "Tags": [{"Key": "spr-cluster:cluster", "Value": "spr"}]}
    ]
    ec2.create_security_group(GroupName="left", Description="d", TagSpecifications=kinds)

    assert line.must("gc", "--yes").out == "Removed: spr.\n"

    assert ClusterFiles.of("spr").key.read_text() == key
    line.cloud.faults("")
    assert len(line.ids()) == 2


# The key


@pytest.mark.parametrize("has_begun", [False, True])
def test_an_empty_look_deletes_no_key(line: CommandLine, has_begun: bool) -> None:
    """The cluster's account is unknown; or the machines are only not shown."""
    line.begin("--nodes", "2")
    files = ClusterFiles.of("spr")
    lines = files.ssh_config.read_text().splitlines(keepends=True)
    files.ssh_config.write_text("".join([lines[0], *lines[2:]]))
    key = files.key.read_text()
    if has_begun:  # the removal in the cluster's own account
        files.removal.write_text("aws us-east-1 123456789012")
    line.cloud.faults(_OTHER_ACCOUNT)

    result = line.must("down", "--yes")

    assert result.out.startswith(
        "Nothing of cluster spr exists in aws us-east-1.\nThis machine keeps "
    )
    assert f"rm -r {files.folder}" in result.out.replace("\n", " ")
    assert files.key.read_text() == key
    line.cloud.faults("")
    assert line.must("down", "--yes").out == "Nothing left of cluster spr.\n"
    assert files_at_home() == []


def test_a_down_that_was_interrupted_is_completed_unless_up_follows(line: CommandLine) -> None:
    line.begin("--nodes", "2")
    # Every resource names its owner.
    assert {"ami", "snap", "vol", "i"} <= {id_.partition("-")[0] for id_ in line.cloud.left()}
    assert owners(line) == {_ANN}
    files = ClusterFiles.of("spr")
    files.removal.write_text("aws us-east-1 123456789012")
    line.must("up", "--yes")
    assert not files.removal.exists()
    key, config = files.key.read_text(), files.ssh_config.read_text()
    line.must("down", "--yes")
    files.folder.mkdir(exist_ok=True)
    files.key.write_text(key)
    files.ssh_config.write_text(config)
    files.removal.write_text("aws us-east-1 123456789012")

    line.must("down", "--yes")

    assert files_at_home() == []


@pytest.mark.parametrize("readable", [True, False])
def test_down_needs_no_writable_folder(
    readable: bool, line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.begin("--nodes", "2")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("Read-only file system")

    with monkeypatch.context() as patch:
        if readable:
            patch.setattr("cluster.local_files.ClusterFiles.lock", refuse)
        else:
            patch.setenv("SPR_CLUSTER_HOME", "/dev/null/x")
        for place in ("local_files.write_private", "lifecycle.down.write_private"):
            patch.setattr(f"cluster.{place}", refuse)
        result = line.must("down", "--yes")

    assert "; no other command may use the cluster meanwhile" in result.err
    assert line.cloud.left() == []


# The owner


def owners(line: CommandLine) -> set[str]:
    """The owners that tags name, and "" for a resource of ours without one."""
    found = [
        tags for tags in line.cloud.fake.backend.tags.values() if "spr-cluster:cluster" in tags
    ]
    return {tags.get("spr-cluster:owner", "") for tags in found}


def test_somebody_elses_cluster_needs_yes_and_its_name(
    line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.begin("--nodes", "2")
    line.lose(line.ids()[1])
    machines = line.ids()
    line.cloud.faults(_BOB)

    for verb in ("down", "extend 1h", "up --nodes 3", "repair"):
        for options in (["--yes"], *([[], ["--name", "spr"]] if verb == "down" else ())):
            result = line.run(*verb.split(), *options)
            assert result.code == 2
            assert result.message == (
                f"cluster 'spr' belongs to {_ANN}, not to {_BOBS_ARN}\n"
                "  → --yes with --name spr confirms"
            )
    with monkeypatch.context() as patch:  # EC2 lists it only after the question
        patch.setattr("cluster.cli.down.describe_inventory", lambda *_: Inventory())
        assert "belongs to" in line.run("down").message
    assert line.ids() == machines

    line.must("repair", "--yes", "--name", "spr")
    # Who repairs a cluster does not become its owner.
    assert owners(line) == {_ANN}
    line.must("down", "--yes", "--name", "spr")
    assert line.cloud.left() == []


def test_on_a_terminal_the_owner_is_named(
    line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.begin("--nodes", "2")
    line.cloud.faults(_BOB)
    monkeypatch.setattr("cluster.cli.chosen_cluster.has_terminal", lambda: True)
    monkeypatch.setattr("cluster.console.output.has_terminal", lambda: True)
    asked: list[str] = []

    def answer() -> str:
        asked.append("")
        return "yes\n"

    monkeypatch.setattr("sys.stdin.readline", answer, raising=False)

    result = line.must("down")

    assert f"Cluster 'spr' belongs to {_ANN}, not to {_BOBS_ARN}. Continue? [y/N]" in result.err
    assert len(asked) == 1
    assert line.ids() == []


def test_list_and_gc_name_the_owner(line: CommandLine) -> None:
    line.begin("--nodes", "1", "--name", "bert")
    line.cloud.faults('caller = "assumed-role/AWSReservedSSO_Admin_0a/bob@example.com"\n')
    rows = [row.split() for row in line.must("list").out.splitlines()]
    assert [rows[0][-1], rows[1][-1]] == ["OWNER", "spr-cluster"]
    assert json.loads(line.must("list", "--json").out)["clusters"][0]["owner"] == _ANN
    for tags in line.cloud.fake.backend.tags.values():
        if "spr-cluster:expires" in tags:
            for label in ("spr-cluster:expires", "spr-cluster:latest"):
                tags[label] = "2020-01-01T00:00:00Z"

    result = line.must("gc", "--yes")

    assert f"made by {_ANN}" in result.err
    assert result.out == "No forgotten clusters.\n"
    assert "spr-cluster down --yes --name bert --cloud aws --region us-east-1" in result.err
    line.cloud.faults("")
    assert line.must("gc", "--yes").out == "Removed: bert.\n"
