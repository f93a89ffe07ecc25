"""Event log: what was done to a cluster and why, on this machine, also after ``down``."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from cluster.local_files import (
    ClusterFiles,
    EventLog,
    cluster_names,
    remembered_cloud,
)
from infra.aws.clients import connect
from infra.ec2 import tags
from infra.ec2.tags import render_time
from infra.plan.actions import Action, ActionKind
from tests.harness.command_line import CommandLine
from tests.harness.simulated_cloud import SimulatedCloud

PRIVATE_KEY = (
    "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk\n-----END OPENSSH PRIVATE KEY-----"
)


def make_log(tmp_path: Path) -> EventLog:
    now = datetime(2026, 11, 22, 5, 49, 12, tzinfo=timezone.utc)
    return EventLog(tmp_path / "bert" / "events.jsonl", "up", lambda: now)


def named(log: EventLog, event: str) -> list[dict[str, Any]]:
    return [each for each in log.read() if each["event"] == event]


def test_each_event_is_one_private_line(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    assert log.read() == []

    log.record("bought", "2 x m7i.2xlarge", reason="first\nsecond", resources=["i-1"], zone="a")
    log.record_action("done", Action(ActionKind.TERMINATE, "i-2 (stopped)", ("i-2",)))

    assert log.path.stat().st_mode & 0o777 == 0o600
    assert len(log.path.read_text().splitlines()) == 2
    bought, done = log.read()
    assert bought["time"] == "2026-11-22T05:49:12Z"
    assert (bought["command"], bought["resources"], bought["zone"]) == ("up", ["i-1"], "a")
    assert (done["event"], done["what"]) == ("done", "Terminate: i-2 (stopped)")


def test_damaged_lines_are_skipped_and_a_torn_one_spoils_no_other(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    log.record("plan", "one")
    with log.path.open("ab") as file:
        file.write(b'\xff\xfe\n[]\n{"time": 1}\n{"time": "2026-11-22T0')
    log.record("plan", "two")

    assert [event["what"] for event in log.read()] == ["one", "two"]
    EventLog(log.path / "not a folder" / "log").record("plan", "stops no command")


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        (f"could not read {PRIVATE_KEY}", "b3BlbnNzaC1rZXk"),
        ("https://user:hunter2@pypi.example/simple failed", "hunter2"),
        ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG", "wJalrXUtnFEMI"),
        ('{"token": "hf_abcdefghijkl"}', "hf_abcdefghijkl"),
    ],
)
def test_secrets_in_messages_are_not_kept(tmp_path: Path, text: str, secret: str) -> None:
    log = make_log(tmp_path)
    log.record("error", text, reason=text, hint=[text])
    assert secret not in log.path.read_text()
    assert "***" in log.path.read_text()


def test_why_a_node_was_replaced_is_found(cloud: SimulatedCloud) -> None:
    cloud.faults("[[machine]]\nn = 1\nfate = 'no-ssh'\n")
    cloud.clock.pace = 60
    cloud.up(nodes=2, bake="none")

    log = cloud.ctx.events
    (faulty,) = named(log, "faulty")
    (lost,) = faulty["resources"]
    assert (faulty["what"], "no SSH" in faulty["reason"]) == ("node1", True)
    bought = named(log, "bought")[-1]
    assert bought["replaces"] == {lost: faulty["reason"]}
    replacement = cloud.cluster().nodes[1].instance
    assert bought["resources"] == [replacement.id]
    # Other machines have no log of it.
    assert replacement.tags[tags.REPLACES] == f"replaces {lost}: {faulty['reason']}"
    assert (bought["market"], bought["zone"][:9]) == ("on-demand", "us-east-1")
    first, second = named(log, "plan")
    assert first["reason"] == "0 of 2 nodes running"
    assert lost in second["reason"]
    assert any(action.startswith(f"Terminate: {lost}") for action in second["actions"])
    assert any(lost in event["resources"] for event in named(log, "done"))


def test_the_log_survives_down_and_is_no_cluster(cloud: SimulatedCloud) -> None:
    cloud.prepared(nodes=1)
    files = cloud.ctx.files
    key, groups = files.key.read_text(), cloud.found("security_groups").ids()

    removed = cloud.down()

    assert [path.name for path in files.folder.iterdir()] == ["events.jsonl"]
    assert (cluster_names(), remembered_cloud("bert"), files.exist) == ([], None, False)
    text = files.events.read_text()
    assert key.splitlines()[1] not in text
    assert "PRIVATE KEY" not in text
    (gone,) = named(cloud.ctx.events, "removed")
    assert gone["time"].startswith("2027-01-15T"), "the context's time"
    assert sorted(gone["resources"]) == sorted(id_ for ids in removed.ids.values() for id_ in ids)
    assert {r for event in named(cloud.ctx.events, "created") for r in event["resources"]} >= {
        *groups["security_groups"],
        "spr-cluster-bert",
    }
    size = files.events.stat().st_size
    assert cloud.down().ids == {}
    assert files.events.stat().st_size == size


def test_the_command_shows_what_was_done(line: CommandLine) -> None:
    none = line.must("events").out
    assert none.startswith("No events of cluster spr on this machine (")
    line.begin("--nodes", "1")
    line.must("down", "--yes")

    result = line.must("events")
    lines = result.out.splitlines()
    assert any("accepted: $" in each and "--yes" in each for each in lines)
    assert any(": bought: " in f": {each[17:]}" and "[i-" in each for each in lines)
    assert not any("begun: " in each for each in lines)
    assert "removed: cluster spr" in lines[-1]
    assert line.must("events", "--name", "spr", "--tail", "1").out.splitlines() == lines[-1:]
    events = json.loads(line.must("events", "--json", "--tail", "3").out)["events"]
    assert len(events) == 3
    assert (events[-1]["command"], events[-1]["event"]) == ("down", "removed")
    log = EventLog(ClusterFiles.of("spr").events, "up")
    log.record_action("begun", Action(ActionKind.RECORD, "1 node"))
    assert "begun: Record: 1 node" in line.must("events").out, "it never ended"
    long_ago = datetime(2020, 3, 1, 12, tzinfo=timezone.utc)
    EventLog(log.path, "down", lambda: long_ago).record("removed", "another one of this name")
    first = line.must("events").out.splitlines()[0]
    assert first == "2020-03-01 12:00:00  removed: another one of this name"


def test_an_error_is_kept_with_its_hint_and_names_the_log(line: CommandLine) -> None:
    line.cloud.faults("[[error]]\naction = 'ImportKeyPair'\ncode = 'Boom'\nmessage = 'no'\n")

    result = line.run("up", "--nodes", "1", "--yes")

    assert result.code == 1
    assert result.message.endswith(
        "\n  → spr-cluster events --name spr shows what was done and why"
    )
    log = EventLog(ClusterFiles.of("spr").events)
    assert named(log, "error")[-1]["what"] == result.message.splitlines()[0]
    assert named(log, "failed")[-1]["action"] == "import_key"


@pytest.mark.parametrize("cloud", ["aws", "local"])
def test_that_the_nodes_have_ended_by_themselves_is_shown(line: CommandLine, cloud: str) -> None:
    clients = connect(line.open_cloud(cloud, None, None))
    clients.s3.create_bucket(Bucket="results")
    options = ("--nodes", "1", "--yes", "--cloud", cloud)
    line.must("up", *options, "--bucket", "s3://results/team")
    bought = [e for e in EventLog(ClusterFiles.of("spr").events).read() if e["event"] == "bought"]
    assert "ended: " not in line.must("events").out
    clients.ec2.terminate_instances(InstanceIds=bought[0]["resources"])
    ended = json.loads(line.must("events", "--json").out)["events"][-1]
    line.cloud.clock.now += 120
    assert ended["event"] == "ended"
    assert json.loads(line.must("events", "--json").out)["events"][-1] == ended
    line.cloud.clock.now += 2 * 3600  # EC2 no longer lists it
    assert "-                ended: no machine" in line.must("events").out

    shown = " ".join(line.must("events").out.split())
    assert "ended: no machine is left" in shown
    listing = f"spr-cluster jobs s3://results/team{' --cloud local' * (cloud == 'local')}"
    assert f"its jobs: {listing}" in shown
    assert f": {listing}; " in " ".join(line.run("extend", "1h").message.split())
    line.must("down", "--yes")
    assert "no machine is left" not in line.must("events").out
    line.cloud.faults('[[capacity]]\nzone = "*"\nfree = 0\n')
    assert line.run("up", "--nodes", "1", "--yes").code == 1
    assert "no machine is left" not in line.must("events").out, "the new one has had none yet"


def test_a_replacement_by_another_computer_is_listed_from_its_tags(line: CommandLine) -> None:
    line.begin("--nodes", "1")
    log = ClusterFiles.of("spr").events
    (bought,) = [e for e in EventLog(log).read() if e["event"] == "bought"]
    ec2 = connect(line.open_cloud("aws", None, None)).ec2
    why = "replaces i-1: no answer"
    ec2.create_tags(Resources=bought["resources"], Tags=[{"Key": tags.REPLACES, "Value": why}])
    log.unlink()

    (event,) = json.loads(line.must("events", "--json").out)["events"]
    assert (event["event"], event["resources"]) == ("bought", bought["resources"])
    assert "reason: replaces i-1: no answer" in " ".join(line.must("events").out.split())


CREATED = datetime(2026, 7, 31, 14, tzinfo=timezone.utc)


def event(minute: float, kind: str, *ids: str, **more: Any) -> dict[str, Any]:
    time = render_time(CREATED + timedelta(minutes=minute))
    return {"time": time, "event": kind, "what": "", "resources": [*ids], **more}


@pytest.mark.parametrize(
    ("events", "after", "minutes"),
    [
        ([event(-9, "bought", "i-0"), event(0, "plan")], None, 0),
        ([event(1, "bought", "i-0", "i-1"), event(9, "plan", "i-0", "i-1")], None, 0),
        ([event(1, "bought", "i-0", "i-1"), event(9, "plan", "i-0")], None, 8),
        ([event(1, "bought", "i-0"), event(9, "plan"), event(20, "plan")], None, 8),
        ([event(1, "bought", "i-0"), event(9, "plan")], 5, 4),
        ([event(1, "bought", "i-0"), event(9, "plan")], 10, 0),
        ([event(1, "bought", "i-0"), event(2, "plan"), event(3, "plan", "i-0")], None, 0),
        ([event(1, "bought", "i-0"), event(41, "faulty", "i-0", ran=False), event(41, "plan")], None, 0),
        ([event(1, "bought", "i-0"), event(41, "faulty", "i-0", ran=True), event(41, "plan")], None, 40),
        ([event(1, "bought", "i-0"), {**event(9, "plan"), "time": "damaged"}], None, 0),
    ],
)  # fmt: skip
def test_a_former_machine_is_paid_from_its_purchase_to_the_plan_without_it(
    events: list[dict[str, Any]], after: float | None, minutes: float, tmp_path: Path
) -> None:
    since = None if after is None else CREATED + timedelta(minutes=after)
    log = make_log(tmp_path)
    log.path.parent.mkdir()
    log.path.write_text("".join(json.dumps(each) + "\n" for each in events))
    assert log.former_s(CREATED, since) == 60 * minutes
