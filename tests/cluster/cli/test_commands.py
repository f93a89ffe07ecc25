"""Every verb on a cluster's way from nothing to nothing: what is printed, as text and as JSON."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import subprocess
import threading
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import NoRegionError

from cluster.cli import status
from cluster.cli.ssh import AUTHORIZE
from cluster.lifecycle.deadline import extend
from cluster.local_files import ClusterFiles, cluster_names, home, remembered_cloud
from cluster.nodes import find_cluster
from infra.aws.api_time import API_TIME
from infra.aws.clients import Clients
from infra.ec2 import tags
from infra.ec2.instances import label_instances
from infra.ec2.inventory import describe_inventory
from infra.ec2.key_pair import generate_key_pair
from infra.errors import NoClusterError
from provision.host import Result
from tests.harness.command_line import CommandLine, CommandResult
from tests.harness.failures import record
from tests.infra.resource_factory import ResourceFactory

_ENDS = ("spr-cluster:expires", "spr-cluster:latest")
STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
UNTIL = r"(\w{3} \d+ at )?\d\d:\d\d UTC \(in \d+ (h|min).*\)"
HELD = rf"{UNTIL}, or up to (\w{{3}} \d+ at )?\d\d:\d\d UTC while\sresults wait for `fetch`"


def parsed(result: CommandResult) -> dict[str, Any]:
    """What a command printed on stdout: one line of JSON and nothing else."""
    assert result.code == 0, result.err
    assert result.out.count("\n") == 1
    content: dict[str, Any] = json.loads(result.out)
    return content


def test_the_proposal_is_shown_before_confirmation(line: CommandLine) -> None:
    line.cloud.faults("[quota]\non_demand_vcpus = 128\n")

    result = line.run("up", "--nodes", "4", "--instance-type", "r7iz.metal-16xl,m7i.metal-24xl")

    assert result.code == 2
    assert result.out == ""
    for text in (
        "Cluster spr of 4 nodes, aws us-east-1:",
        "Nodes: 4 x r7iz.metal-16xl or m7i.metal-24xl, 100 GiB encrypted gp3, 750 MiB/s, from "
        "Canonical's Ubuntu image  [5 to 20 min]",
        "Software: stack upstream (PyTorch 2.13, transformers 5.23, Intel MPI 2021.18, tcmalloc). IPEX and "
        "oneCCL: --stack intel.",
        "Installation: --bake none takes 11 to 38 min; --bake head takes 20 to 105 min.",
        # The more expensive of the two, with disk and public address.
        "$26.39 an hour on demand: 4 x $6.5472, plus $0.0508 each",
        "(Price List API, 20",
        "At most $213.",
        "Quota L-1216C47A: needs 384 vCPUs, you have 128. That is too few",
        "us-east-1a",
        "UTC (in 8 h)",
        "UTC if results wait for `fetch`).",
    ):
        assert text in result.err
    assert not line.changes


@pytest.mark.parametrize("argv", [["up", "--dry-run"], ["repair", "--dry-run"]])
def test_a_dry_run_changes_nothing_and_shows_the_actions(
    line: CommandLine, argv: list[str]
) -> None:
    if argv[0] == "repair":
        line.begin("--nodes", "2")
        line.lose(line.ids()[1])
    before = line.changes

    with ClusterFiles.of("spr").lock():  # a plan needs none
        as_json = parsed(line.run(*argv, "--json"))

    assert line.changes == before
    assert as_json["changes"] is True
    kinds = [action["kind"] for action in as_json["actions"]]
    assert "run_workers" in kinds if argv[0] == "repair" else "run_nodes" in kinds
    assert as_json["quota"]["code"] == "L-1216C47A"
    assert as_json["usd_at_most"] > as_json["usd_per_hour"] > 6
    assert as_json["zones"][0] == "us-east-1a"


def test_the_plan_is_what_up_then_shows_and_does(line: CommandLine) -> None:
    planned = line.must("up", "--dry-run", "--nodes", "2").out
    shown = line.must("up", "--nodes", "2", "--yes").err

    assert planned.endswith("Nothing was changed.\n")
    actions = [row for row in planned.splitlines() if re.match(r"  \S", row)]
    assert len(actions) == 9
    for row in actions:
        assert row in shown
        title = re.sub(r"  \[.*", "", row.strip())
        assert f"done in 0.0 s: {title}" in re.sub(r"in \S+ s:", "in 0.0 s:", shown)


def test_a_second_up_changes_nothing_and_extend_moves_the_end(line: CommandLine) -> None:
    first = line.begin("--nodes", "2")
    rows = [row.split()[:2] for row in first.out.splitlines()[:2]]
    assert rows == [["node0", line.ids()[0]], ["node1", line.ids()[1]]]
    assert re.search(rf"^Nodes shut down automatically at {HELD}. To extend: ", first.out, re.M)

    before = line.changes
    again = line.must("up")  # without --yes: there is nothing to buy
    result = parsed(line.run("up", "--json"))

    assert "Up to date: 2 nodes, verified\n" in again.out
    assert line.changes == before
    assert result["changed"] is False
    assert [node["name"] for node in result["nodes"]] == ["node0", "node1"]
    assert set(result["nodes"][0]) == {
        *("name", "instance", "type", "zone", "state", "private_ip", "public_ip")
    }
    assert re.fullmatch(STAMP, result["expires"])
    text = line.must("extend", "90m").out
    assert re.fullmatch(rf"Nodes of cluster spr shut down automatically at {HELD}\n", text)
    line.cloud.faults("[[error]]\naction = 'CreateTags'\ncode = 'ExpiredToken'\nafter = 1\n")
    expired = line.run("extend", "1m")
    assert expired.code == 1  # 2 would say that nothing was changed
    assert "`spr-cluster extend 1m --name spr` sets it on all nodes" in expired.message
    longer = parsed(line.run("extend", "30m", "--json"))
    assert result["expires"] < longer["expires"] < longer["latest"]


def test_status_of_a_cluster(line: CommandLine) -> None:
    line.begin("--nodes", "2")
    assert "No cluster x in aws us-east-1" in line.must("status", "--name", "x").out
    assert parsed(line.run("status", "--name", "x", "--json"))["state"] == "none"

    text = line.must("status").out
    result = parsed(line.run("status", "--json"))

    head, worker = line.ids()
    assert re.search(rf"^node0 +running +r7iz.metal-16xl +{head} .* console$", text, re.MULTILINE)
    assert re.search(rf"^node1 +running +r7iz.metal-16xl +{worker} .* head$", text, re.MULTILINE)
    assert "Cluster spr is running: 2 of 2 nodes, stack upstream" in text
    set_to = (
        rf"^Nodes are set to shut down at {UNTIL}, or up to .* UTC while results wait for `fetch`; "
        "`spr-cluster verify` checks each node's timer$"
    )
    assert re.search(set_to, text, re.M)
    assert "Resources: 2 instances" in text
    assert (result["state"], result["wanted_nodes"], result["stack"]) == ("running", 2, "upstream")
    assert [node["spot_notice"] for node in result["nodes"]] == [None, None]
    assert [node["host_key_verified_by"] for node in result["nodes"]] == ["console", "head"]
    assert set(result["resources"]) >= {"instances", "images", "security_groups"}

    line.cloud.faults("terminate_s = 3600\n")
    line.cloud.ec2.stop_instances(InstanceIds=[worker])
    line.must("repair", "--yes")
    result = parsed(line.run("status", "--json"))
    assert len(result["resources"]["instances"]) == 3, "the replaced worker has ended already"
    assert [node["name"] for node in result["nodes"]] == ["node0", "node1"]
    assert result["nodes"][1]["instance"] not in (head, worker)


def test_status_shows_how_busy_the_queue_is(
    line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.begin("--nodes", "2")
    idle = {"nodes": 2, "usable_nodes": 2, "running": 0, "waiting": 0, "unusable": {}}
    idle |= {"cores_in_use": 0, "cores": 4, "unknown": None}
    assert parsed(line.run("status", "--json"))["queue"] == idle
    rows = "node0|allocated|1/1/0/2\nnode1|down*|0/0/2/2\n7|RUNNING|node0|None|ours\n"
    ended = threading.Event()
    for answer, said in (
        (
            Result(0, f"{rows}8|PENDING||Resources|a|b\n", ""),
            "\nQueue: 1 of 2 nodes (node1 is down), 1 job running on 1 of 4 cores, 1 waiting\n",
        ),
        (
            Result(1, "", "slurm_load_partitions: Unable to contact slurm"),
            "Queue: unknown, because the head did not answer: [node0] Slurm does not answer: ",
        ),
        (lambda _: Result(0, str(ended.wait(60)), ""), "not answer: no answer within 0.1 s"),
    ):
        line.machines.staged.clear()
        line.stage("node0", "# asking how busy the queue is", answer)
        monkeypatch.setattr(status, "_QUEUE_S", 0.1 if callable(answer) else 3)
        assert said in line.must("status").out
    ended.set()


def test_verify_looks_again_at_a_console_that_showed_no_key(line: CommandLine) -> None:
    line.cloud.faults("[console]\nlatest = false\ndelay_s = 3600\n")
    line.must("up", "--nodes", "1", "--yes")
    assert "  first contact\n" in line.must("status").out

    line.cloud.clock.now += 3600
    line.run("verify")

    assert "  console\n" in line.must("status").out


def test_status_during_up_names_the_command_at_work(line: CommandLine) -> None:
    """No advice to repair what another terminal is building."""
    line.begin("--nodes", "2")
    line.lose(line.ids()[1])
    assert "To repair: spr-cluster repair --name spr" in line.must("status").out

    with ClusterFiles.of("spr").lock("up"):
        text = line.must("status").out
        busy = parsed(line.run("status", "--json"))["in_use_by"]
        with ClusterFiles.of("other").lock("up"):
            nothing_yet = line.must("status", "--name", "other").out

    assert f"`spr-cluster up` (PID {os.getpid()}) is working on it" in text
    assert "spr-cluster repair" not in text
    assert busy == {"command": "up", "pid": os.getpid()}
    assert f"`spr-cluster up` (PID {os.getpid()}) is working on it" in nothing_yet
    assert parsed(line.run("status", "--json"))["in_use_by"] is None


def test_status_from_another_machine_during_up(line: CommandLine) -> None:
    line.cloud.faults('[[machine]]\nfate = "no-amx"\n')
    assert line.run("up", "--nodes", "2", "--yes").code == 1
    interrupted = line.must("status").out
    for command in ("train squad --demo", "verify"):
        refused = line.run(*command.split())
        assert "`up` has not connected its nodes yet" in refused.message
    ClusterFiles.of("spr").remove()

    elsewhere = line.must("status").out

    assert "Cluster spr is degraded" in interrupted
    assert "To continue: spr-cluster up --name spr" in interrupted
    assert "Cluster spr is starting: 2 of 2 nodes" in elsewhere
    assert "repair" not in elsewhere


def test_status_after_an_up_that_bought_nothing_or_failed_to_grow(line: CommandLine) -> None:
    line.begin("--nodes", "2")
    line.cloud.faults("[[error]]\naction = 'RunInstances'\ncode = 'UnauthorizedOperation'\n")
    assert line.run("up", "--name", "new", "--yes").code == 1
    none = line.must("status", "--name", "new").out
    assert "No machines. To continue: spr-cluster up --name new" in none

    line.cloud.faults('[[machine]]\nn = "*"\nfate = "no-amx"\n')
    assert line.run("up", "--nodes", "3", "--yes").code == 1
    assert "To continue: spr-cluster up --name spr" in line.must("status").out
    assert "`spr-cluster up --name spr`" in line.run("train", "squad", "--demo").message


def test_status_offers_no_repair_after_the_end(line: CommandLine) -> None:
    line.begin("--nodes", "2")
    record("bucket", "s3://team")(line)
    line.lose(line.ids()[0])
    assert "`repair` makes one the head" in " ".join(line.must("status").out.split())
    for labels in line.cloud.fake.backend.tags.values():
        labels |= dict.fromkeys({tags.EXPIRES, tags.LATEST} & {*labels}, "2020-01-01T00:00:00Z")
    text = " ".join(line.must("status").out.split())
    assert f"{line.ids()[0]} did not shut down" in text
    assert "repair" not in text
    local = replace(line.cloud.ctx.cloud, name="local", billed=False)
    with pytest.raises(NoClusterError, match="did not shut down and still runs") as caught:
        find_cluster(line.cloud.ec2, local, "spr", line.cloud.ctx.now())
    assert "spr-cluster jobs s3://team --cloud local" in (caught.value.hint or "")
    assert "did not shut down and still costs money" in line.run("extend", "2h").message


def test_status_shows_what_is_wrong_with_a_record(line: CommandLine) -> None:
    """A newer version may have options that this one does not know; no repair can cure that."""
    line.begin("--nodes", "2")
    record("market", "reserved")(line)

    text = line.must("status").out

    assert "invalid cluster record in the tags of the security group: --market reserved" in text
    assert "  → if a newer version made it, install that; else" in text
    assert "spr-cluster repair" not in text


def test_status_warns_of_spot_machines_that_are_taken_back(line: CommandLine) -> None:
    line.cloud.faults('[[machine]]\nn = 1\nfate = "spot-notice"\n')
    line.must("up", "--nodes", "2", "--market", "spot", "--yes")

    text = line.must("status").out

    notice = r"^node1: SPOT NOTICE: .*Your Spot instance is marked for termination\."
    assert re.search(notice, text, re.M)
    assert text.count("SPOT NOTICE") == 1
    assert "Then: spr-cluster repair --name spr" in text
    nodes = parsed(line.run("status", "--json"))["nodes"]
    assert [bool(node["spot_notice"]) for node in nodes] == [False, True]


def test_list_shows_all_clusters_and_gc_removes_the_forgotten_ones(line: CommandLine) -> None:
    line.begin("--nodes", "1", "--name", "bert")
    alive = line.cloud.left()
    ResourceFactory(line.cloud.fake, "forgotten").key_pairs()
    ResourceFactory(line.cloud.fake, "lost").volumes()
    rows = [row.split() for row in line.must("list", "--all-regions").out.splitlines()]
    assert rows[0][:5] == ["NAME", "CLOUD", "REGION", "STATE", "NODES"]
    assert rows[1][:5] == ["bert", "aws", "us-east-1", "running", "1/1"]
    assert rows[2][:5] == ["forgotten", "aws", "us-east-1", "expired", "0/?"]
    assert " ".join(rows[-1]) == "To remove leftovers of ended clusters: spr-cluster gc"
    listed = parsed(line.run("list", "--json"))["clusters"]
    assert [cluster["cluster"] for cluster in listed] == ["bert", "forgotten", "lost"]

    result = line.must("gc", "--yes")

    assert result.out == "Removed: forgotten, lost.\n"
    assert "lost (us-east-1, expired): 1 volume (vol-" in result.err
    assert line.cloud.left() == alive
    assert line.must("gc").out == "No forgotten clusters.\n"
    assert parsed(line.run("gc", "--json")) == {
        "cloud": "aws",
        "not_searched": {},
        "removed": [],
    }


def test_gc_leaves_kept_images_and_unfinished_clusters_without_all(line: CommandLine) -> None:
    line.begin("--nodes", "1", "--name", "bert")
    line.must("down", "--yes", "--keep-image", "--name", "bert")
    line.cloud.faults("[[capacity]]\nfree = 0\n")
    assert line.run("up", "--yes", "--name", "unfinished").code == 1

    result = line.must("gc", "--yes")

    assert "No forgotten clusters." in result.out
    why = "unfinished (new: `up` has bought no nodes yet)"
    assert f"Not removed: bert (a kept image), {why}; --all removes them" in result.out
    ClusterFiles.of("unfinished").remove()
    assert "(new: `up` may still be buying its nodes)" in line.must("gc").out
    # As after an interrupted `down --keep-image`, with an image that is not kept.
    line.cloud.faults("")
    ec2, factory = line.cloud.ec2, ResourceFactory(line.cloud.fake, "bert")
    kept, key, extra = describe_inventory(ec2, "bert"), factory.key_pairs(), factory.images()
    label_instances(ec2, [extra], {tags.SEALED: "yes"})
    result = line.must("gc", "--yes")
    assert result.out.startswith("Removed: bert.\n")
    assert key in result.err
    assert extra in result.err
    assert kept.images[0].id not in result.err
    assert describe_inventory(ec2, "bert") == kept
    line.lose(*line.ids())
    removed = parsed(line.run("gc", "--all", "--yes", "--json"))["removed"]
    assert removed == ["bert", "unfinished"]
    assert line.cloud.left() == []


def test_ended_machines_and_an_interrupted_removal_are_no_new_cluster(line: CommandLine) -> None:
    line.begin("--nodes", "1", "--name", "bert")
    line.must("up", "--nodes", "1", "--yes", "--name", "removed")
    for id_ in line.ids():
        line.lose(id_)
    files = ClusterFiles.of("removed")
    account = line.cloud.ctx.clients.caller.account
    files.removal.write_text(f"aws eu-west-1 {account}")
    assert "removal has begun" not in line.must("status", "--name", "removed").out
    files.removal.write_text(f"aws us-east-1 {account}")

    listed = line.must("list").out
    assert listed.count("no machines, image billed") == 2
    assert "free" not in listed
    ended = line.must("status", "--name", "bert").out
    assert "To create new ones: spr-cluster up --name bert; to remove what is left" in ended
    assert (
        "To continue: spr-cluster down --name removed"
        in line.must("status", "--name", "removed").out
    )
    assert line.must("gc", "--yes").out == "Removed: bert, removed.\n"
    assert line.cloud.left() == []


def test_repair_refuses_a_cluster_without_machines_and_up_keeps_its_time_to_live(
    line: CommandLine,
) -> None:
    line.begin("--nodes", "2")
    for id_ in line.ids():
        line.lose(id_)

    result = line.run("repair", "--yes")

    assert result.code == 2
    assert result.message == (
        "cluster 'spr' has no machines\n"
        "  → `spr-cluster up --name spr` creates them, with a new time to live of 8h"
    )
    assert line.ids() == []
    line.cloud.clock.now += 3600
    until = datetime.fromtimestamp(line.cloud.clock.now + 8 * 3600, timezone.utc)
    out = line.must("up", "--yes").out
    # With the date in the last hours of a day.
    assert re.search(
        rf"^Nodes shut down automatically at (\w+ \d+ at )?{until:%H:%M} UTC", out, re.M
    )


def test_gc_leaves_a_cluster_alone_that_was_renewed_while_it_asked(
    line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.begin("--nodes", "1", "--name", "bert")
    group = line.cloud.group
    expires = group.tags["spr-cluster:expires"]
    ids = [group.id, *line.ids()]
    label_instances(line.cloud.ec2, ids, dict.fromkeys(_ENDS, "2020-01-01T00:00:00Z"))

    def renew(*_: object, **__: object) -> None:
        later = {**dict.fromkeys(_ENDS, expires), "spr-cluster:generation": "99"}
        label_instances(line.cloud.ec2, ids, later)

    monkeypatch.setattr("cluster.cli.list.confirm", renew)

    result = line.run("gc")

    assert result.code == 1
    assert "another command" in result.message
    assert len(line.ids()) == 1


def test_gc_leaves_the_cluster_alone_that_replaced_a_kept_image_while_it_asked(
    line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.begin("--nodes", "1")
    line.must("down", "--yes", "--keep-image")
    up = ("up", "--nodes", "1", "--yes")
    monkeypatch.setattr("cluster.cli.list.confirm", lambda *_, **__: line.must(*up))

    result = line.run("gc", "--all")

    assert "it is in use again" in result.message
    assert len(line.ids()) == 1


def test_down_verifies_that_nothing_is_left(line: CommandLine) -> None:
    line.begin("--nodes", "2")
    machines = sorted(line.ids())
    refused = line.run("down")
    assert refused.code == 2
    assert "Cluster spr in us-east-1: 2 instances" in refused.err

    result = line.run("down", "--yes", "--keep-image", "--json")

    said = parsed(result)
    assert (said["cluster"], said["removed"]["instances"]) == ("spr", machines)
    assert set(said["kept"]) == {"images", "snapshots"}
    terminated = re.search(r"Terminate: (.*)", result.err)
    assert terminated
    assert sorted(terminated[1].split(", ")) == machines
    assert line.must("down", "--yes", "--keep-image").out.startswith("Kept: 1 image (ami-")
    line.cloud.faults("[[error]]\naction = 'DeleteSnapshot'\ncode = 'ExpiredToken'\ntimes = 9\n")
    assert line.run("down", "--yes").code == 1  # 2 would say that nothing was changed
    line.cloud.faults("")
    assert line.must("down", "--yes").out == "Nothing left of cluster spr.\n"
    assert line.cloud.left() == []
    again = line.must("down")  # nothing to ask about
    assert again.out == "Nothing of cluster spr exists in aws us-east-1.\n"


def test_a_colleague_is_let_in_by_a_public_key(line: CommandLine, tmp_path: Path) -> None:
    line.begin("--nodes", "2")
    reached: list[str] = []

    def authorize(node: str, _: object) -> Result:
        reached.append(node)
        return Result(0, "", "")

    for node in ("node0", "node1"):
        line.stage(node, "authorizing a key", functools.partial(authorize, node))
    key = generate_key_pair("ann@laptop")
    (tmp_path / "ann.pub").write_text(key.public + "\n")

    result = line.must("ssh", "--authorize", str(tmp_path / "ann.pub"))
    assert sorted(reached) == ["node0", "node1"]
    assert re.search(r"SHA256:\S+ ann@laptop can log in: ssh ubuntu@[\d.]+, ", result.err)
    event = json.loads(line.must("events", "--json", "--tail", "1").out)["events"][0]
    assert (event["event"], event["what"]) == ("authorized", result.err.partition(" can")[0])
    assert len(event["resources"]) == 2

    for text, wanted in (
        (key.private, "this is a private key, which must not leave its machine; expected one"),
        (f"{key.public}\n{key.public}", "expected one public key in OpenSSH's format"),
        (f'command="id" {key.public}', "expected one public key in OpenSSH's format"),
        ("ssh-ed25519 AAAA", "expected one public key in OpenSSH's format"),
        ("", "expected one public key in OpenSSH's format"),
    ):
        (tmp_path / "wrong").write_text(text)
        refused = line.run("ssh", "--authorize", str(tmp_path / "wrong"))
        assert (refused.code, refused.message.partition(": ")[2][: len(wanted)]) == (2, wanted)
    assert line.run("ssh", "--authorize", "none").code == 2
    assert len(reached) == 2


def test_an_authorized_key_is_added_once(tmp_path: Path) -> None:
    (tmp_path / ".ssh").mkdir()
    file = tmp_path / ".ssh" / "authorized_keys"
    file.write_text("ssh-rsa AAAA of the cluster")  # without an end
    for key in ("ssh-ed25519 AAAB it's ann", "ssh-ed25519 AAAB it's ann", "ssh-ed25519 AAAC bob"):
        command = AUTHORIZE.format(key=shlex.quote(key))
        subprocess.run(["bash", "-c", command], env={"HOME": str(tmp_path)}, check=True)
    lines = [text for text in file.read_text().split("\n") if text]
    assert lines[1:] == ["ssh-ed25519 AAAB it's ann", "ssh-ed25519 AAAC bob"]


def test_ssh_is_the_machines_own_ssh_with_the_clusters_configuration(
    line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.begin("--nodes", "2")
    monkeypatch.setattr("cluster.cli.ssh.shutil.which", lambda _: "/usr/bin/ssh")
    for argv in (["ssh"], ["ssh", "node1"], ["ssh", "1", "--", "lscpu"], ["ssh", "--", "hostname"]):
        line.run(*argv)

    config = str(line.cloud.ctx.files.folder.with_name("spr") / "ssh_config")
    assert [argv[1:] for argv in line.ssh_calls] == [
        ["-F", config, "node0"],
        ["-F", config, "node1"],
        ["-F", config, "node1", "lscpu"],
        ["-F", config, "node0", "hostname"],
    ]
    assert "Host node1" in Path(config).read_text()

    for port in ("8888:localhost:80", "127.0.0.1:8888:10.0.0.7:80", "8888"):
        line.run("ssh", "-L", port)
        whole = port if ":" in port else "8888:localhost:8888"
        assert line.ssh_calls.pop()[3:] == ["-L", whole, "-o", "ExitOnForwardFailure=yes", "node0"]
    monkeypatch.setattr("cluster.cli.ssh.has_terminal", lambda: True)
    line.run("ssh", "node1")
    line.run("ssh", "node1", "--", "lscpu")
    terminal = ["-t", "-o", "LogLevel=ERROR"]
    assert [argv[3:] for argv in line.ssh_calls[4:]] == [["node1"], [*terminal, "node1", "lscpu"]]

    files, node1 = ClusterFiles.of("spr"), line.ids()[1]
    for path in (files.ssh_config, files.ssh_hosts, files.known_hosts):
        path.unlink()
    elsewhere = "# spr-cluster lives in: aws eu-west-1\n"
    files.ssh_config.write_text(elsewhere)
    line.must("verify", "--region", "us-east-1")
    for words in (["ssh"], ["cp", "node0:x", "."]):
        refused = line.run(*words, "--region", "us-east-1")
        assert "cluster 'spr', in aws eu-west-1, not in aws us-east-1" in refused.message
    assert files.ssh_config.read_text() == elsewhere, "the same name in another place"
    files.ssh_config.unlink()
    line.must("verify", "--region", "us-east-1")
    assert not files.ssh_config.exists(), "it only reads"
    line.must("ssh", "node1")  # a colleague's machine has only the key
    assert f"HostKeyAlias {node1}" in files.ssh_config.read_text()
    assert "Host spr-node1" in files.ssh_hosts.read_text()
    known = {path: path.read_text() for path in (files.ssh_config, files.ssh_hosts)}
    # The nodes may have other addresses or ranks, and the folder may have moved.
    for old, new in (("HostName ", "HostName 9"), (f'"{files.folder}/', '"/moved/')):
        for path, text in known.items():
            assert old in text
            path.write_text(text.replace(old, new))
        line.must("ssh")
        assert {path: path.read_text() for path in known} == known
    assert remembered_cloud("spr") == ("aws", "us-east-1")


def test_up_shows_an_end_that_an_extend_has_moved_meanwhile(
    line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.begin("--nodes", "2")
    ctx = replace(line.cloud.ctx, files=ClusterFiles.of("spr"))

    def extend_meanwhile() -> None:
        line.cloud.steps.before.clear()
        extend(ctx, timedelta(hours=5))

    line.cloud.steps.before["health of all nodes"] = extend_meanwhile
    shown = json.loads(line.must("up", "--nodes", "2", "--yes", "--json").out)

    expires = ctx.find_expiry()
    assert expires
    assert shown["expires"] == tags.render_time(expires)

    def refuse(_: object) -> None:
        raise NoRegionError

    monkeypatch.setattr(Clients, "ec2", property(refuse))
    assert ctx.find_expiry() is None


def test_with_a_wrong_clock_times_are_the_clouds(
    line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.begin("--nodes", "2")
    line.cloud.clock.sleep(600)
    answer = line.call_log._answer

    def answer_with_date(environ: dict[str, Any]) -> Any:
        reply = answer(environ)
        date = formatdate(line.cloud.clock.now, usegmt=True)
        return replace(reply, headers=(*reply.headers, ("Date", date)))

    def local_now() -> datetime:
        return datetime.fromtimestamp(line.cloud.clock.now, timezone.utc) + timedelta(days=1)

    monkeypatch.setattr(line.call_log, "_answer", answer_with_date)
    monkeypatch.setattr(API_TIME, "ahead", timedelta())
    monkeypatch.setattr("infra.aws.api_time.local_now", local_now)

    status = line.must("status")
    listed = line.must("list")

    assert "up for 10 min" in status.out
    assert re.search(rf"set to shut down at {UNTIL}", status.out)
    assert "running" in listed.out
    assert "spr-cluster gc" not in listed.out
    (warning,) = [text for text in status.err.splitlines() if "warning" in text]
    assert warning.startswith("warning: this machine's clock is 24 h ")


def test_a_damaged_home_folder_keeps_no_cluster_alive(line: CommandLine) -> None:
    line.begin("--nodes", "2")
    files = ClusterFiles.of("spr")
    (home() / "Not a Name").mkdir()
    (home() / "Not a Name/ssh_config").write_text("")
    for path in files.folder.iterdir():
        path.write_bytes(b"\xff\xfe[{\0" + b"[" * 100_000)

    assert "spr " in line.must("list").out
    line.must("status")
    assert "No events" in line.must("events").out
    assert cluster_names() == ["spr"]
    assert "key on this machine is damaged or not the right one" in line.run("jobs").message
    line.must("down", "--yes")
    assert line.must("list").out == "No clusters in aws, us-east-1, account 123456789012.\n"


def test_the_next_command_is_one_that_the_stack_runs(line: CommandLine) -> None:
    planned = line.must("up", "--stack", "intel", "--dry-run")
    result = line.must("up", "--nodes", "1", "--stack", "reference", "--yes")

    archived = "Stack intel: Intel has archived IPEX and deprecated the oneCCL bindings"
    assert (planned.out + planned.err).count(archived) == 1
    assert archived not in result.err
    task = "train squad --recipe reference"
    assert f"\nNext: spr-cluster {task}   (when done: spr-cluster down)\n" in result.out
