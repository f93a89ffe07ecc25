"""The embedded cloud as users have it, without the tests' additions, under the commands that need no node."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path

import pytest

from cluster.cli.chosen_cluster import open_cloud
from cluster.context import Context
from infra.aws.clients import connect
from infra.aws.cloud import DEFAULT_REGION, Cloud
from infra.ec2 import tags
from infra.ec2.cluster_record import ClusterRecord, record_tags
from infra.ec2.termination_schedule import ClusterGuard
from infra.iam.instance_profile import ClusterProfile
from infra.local.api.application import Application
from infra.spec import ClusterSpec
from jobs.cli import main
from tests.harness.cloud import list_left, make_cloud
from tests.harness.command_line import replace_everywhere
from tests.infra.local.fakes import (
    Endpoint,
    FakeCloud,
    FakePodman,
    FakeTime,
    leave_moto_as_it_was,
    state_folder,
)

HOUR = timedelta(hours=1)


@pytest.fixture
def shipped(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeCloud]:
    leave_moto_as_it_was(monkeypatch)

    def open_local(_name: str, region: str | None, *_: object, **__: object) -> Cloud:
        return replace(make_cloud(endpoint.url), region=region or DEFAULT_REGION)

    replace_everywhere(monkeypatch, open_cloud, open_local)
    # Clients take a third of a second to make.
    replace_everywhere(monkeypatch, connect, lambda _: endpoint.clients)
    replace_everywhere(monkeypatch, Context, partial(Context, clock=FakeTime()))
    with endpoint.serve(state_folder(tmp_path), FakePodman(), kind=Application) as cloud:
        yield cloud


def leave_cluster(cloud: FakeCloud) -> None:
    """What an interrupted `up --second-guard --bucket` leaves: no machines, but all that names a cluster."""
    spec = ClusterSpec(
        name="bert", nodes=1, bucket="s3://team-b", second_guard=True, ssh_cidrs=("10.0.0.0/8",)
    )
    now = datetime.now(timezone.utc)
    record = record_tags(spec, ClusterRecord(spec.model_dump(), now, now + HOUR, now + 2 * HOUR))
    labels = tags.to_aws({tags.CLUSTER: "bert", **record})
    ec2 = cloud.clients.ec2
    group = ec2.create_security_group(GroupName="spr-cluster-bert", Description="x")["GroupId"]
    ec2.create_tags(Resources=[group], Tags=labels)
    ClusterProfile(cloud.clients, "bert").make(spec)
    ClusterGuard(cloud.clients, "bert").protect(["i-0123"], now + HOUR)


def run(words: str) -> int:
    return main([*words.split(), "--cloud", "local"])


def test_where_nothing_is(shipped: FakeCloud, capsys: pytest.CaptureFixture[str]) -> None:
    for words, shown in (
        ("down --name nope --yes", "Nothing of cluster nope exists in local us-east-1."),
        ("gc --all --yes", "No forgotten clusters."),
        ("list", "No clusters in local, us-east-1, account 123456789012."),
        ("status --name nope", "No cluster nope in local us-east-1."),
        ("images", "No images in local us-east-1."),
        ("up --dry-run --second-guard", "Nothing was changed."),
        ("doctor --second-guard", "`up` should succeed in local us-east-1"),
    ):
        assert run(words) == 0
        assert shown in capsys.readouterr().out


def test_what_is_left_of_a_cluster_is_shown_and_removed(
    shipped: FakeCloud, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("down --name bert --yes", "gc --all --yes"):
        leave_cluster(shipped)
        assert run("list --json") == 0
        (listed,) = json.loads(capsys.readouterr().out)["clusters"]
        assert run("status --name bert --json") == 0
        assert json.loads(capsys.readouterr().out)["resources"] == listed["resources"]
        assert {"guards", "instance_profiles"} <= listed["resources"].keys()

        assert run(command) == 0
        assert "bert" in capsys.readouterr().out
        assert list_left(shipped) == []
