"""The nodes' health check, run for real in a folder: what it asks, decides, and tells Slurm."""

from __future__ import annotations

import os
import time
from importlib import resources
from pathlib import Path

import pytest

from tests.provision.machine import Machine

MIB = 1 << 20
# As `stat -f` prints a file system: free blocks, their size, inodes, free ones, and the path.
_DISKS = "cat {folder}/disks"
# Remembers a node's state as Slurm does.
_SCONTROL = """
state=$(cat {folder}/state)
if [ "$1" = update ]; then
    case "$*" in
    *state=resume*) echo "IDLE" ;;
    *) echo "IDLE+DRAIN Reason=${{4#reason=}} [root@x]" ;;
    esac >{folder}/state
else
    echo "NodeName=$4 Arch=x State=${{state%% *}} Weight=1 ${{state#* }}"
fi
"""
# Instance metadata, version 2: a token first; an answer per file.
_CURL = """
for last; do :; done
[ -e {folder}/imds ] || exit 7
case "$*" in
*'-X PUT'*api/token) echo secret; exit ;;
*'X-aws-ec2-metadata-token: secret '*) ;;
*) printf '\\n401'; exit ;;
esac
file={folder}/imds/${{last#*/meta-data/}}
if [ -e "$file" ]; then cat "$file"; printf '\\n200'; else printf '<xml/>\\n404'; fi
"""


# To the head, a folder.
_SSH = 'cd {folder}/head && exec sh -c "${{!#}}"'


class Node:
    """A node whose disks, metadata, and place in the queue are files."""

    def __init__(self, folder: Path) -> None:
        self.machine = Machine.make(folder)
        self.folder = folder
        for name, body in (("stat", _DISKS), ("scontrol", _SCONTROL), ("curl", _CURL)):
            self.machine.replace(name, body.format(folder=folder))
        self.machine.replace("hostname", "echo ip-10-0-0-1")
        self.machine.replace("runuser", 'exec "${@:4}"')
        self.machine.replace("ssh", _SSH.format(folder=folder))
        (folder / "head/spr-jobs").mkdir(parents=True)
        self.machine.path("/home/ubuntu/spr-jobs").mkdir(parents=True)
        self.state = folder / "state"
        self.state.write_text("IDLE")
        conf = self.machine.path("/etc/slurm/slurm.conf")
        conf.parent.mkdir()
        conf.write_text(
            "NodeName=node0 NodeHostname=ip-10-0-0-10 CPUs=1\n"
            "NodeName=node1 NodeHostname=ip-10-0-0-1 CPUs=1\n"
        )
        self.disk(10_000)

    def disk(self, mib: int, *, inodes: int = 10**6, of: int = 10**6) -> None:
        rows = f"{mib * 256} 4096 {of} {inodes} /home/a b/spr-jobs\n{9 * MIB} 4096 0 0 /\n"
        (self.folder / "disks").write_text(rows)

    def metadata(self, **files: str) -> None:
        for name, text in files.items():
            path = self.folder / "imds" / name.replace("__", "/").replace("_", "-")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def check(self) -> list[str]:
        """Run the health check; returns the programs that it called, apart from looking at disks."""
        before = len(self.machine.calls)
        script = resources.files("cluster").joinpath("slurm/files/health.sh").read_text()
        done = self.machine.shell(script, program="sh")
        assert (done.returncode, done.stderr) == (0, "")
        calls = self.machine.calls[before:]
        return [call for call in calls if call.split()[0] in ("scontrol", "curl")]

    def updates(self) -> list[str]:
        return [call for call in self.check() if call.startswith("scontrol update")]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_healthy_node_asks_slurm_once_and_then_nobody(node: Node) -> None:
    first = node.check()
    assert [call for call in first if call.startswith("scontrol")] == [
        "scontrol -o show node node1"
    ]
    assert sum(call.startswith("curl") for call in first) == 1, "there is no metadata"
    assert node.check() == []
    node.machine.replace("hostname", "echo another")  # no node
    node.disk(1)
    assert [call for call in node.check() if call.startswith("scontrol")] == []


def test_a_full_disk_drains_the_node_until_there_is_room_again(node: Node) -> None:
    node.check()
    node.disk(99)
    reason = "disk: /home/a b/spr-jobs has 99 MiB free"
    assert node.updates() == [f"scontrol update nodename=node1 state=drain reason={reason}"]
    assert node.updates() == []
    node.disk(150)
    assert node.updates() == [], "it must not come and go"
    node.disk(250)
    assert node.updates() == ["scontrol update nodename=node1 state=resume"]
    assert node.check() == []


def test_a_disk_without_inodes_is_full(node: Node) -> None:
    node.disk(5000, inodes=5)
    (drained,) = node.updates()
    assert drained.endswith("reason=disk: /home/a b/spr-jobs has 5 inodes free")
    # A node that reboots remembers why it is drained.
    node.state.write_text("DOWN+DRAIN Reason=disk: / has 0 MiB free [root@x]")
    node.disk(5000, inodes=0, of=0)
    assert node.updates() == ["scontrol update nodename=node1 state=resume"]


def test_a_node_that_somebody_else_drained_stays_drained(node: Node) -> None:
    node.state.write_text("IDLE+DRAIN Reason=slow disk: by hand [root@x]")
    node.disk(1)
    assert node.updates() == []
    node.disk(5000)
    assert node.updates() == []
    assert node.state.read_text().startswith("IDLE+DRAIN")


def test_a_decision_that_slurm_does_not_take_is_repeated(node: Node) -> None:
    node.check()
    node.machine.replace("scontrol", "exit 1")
    node.disk(1)
    node.check()
    node.machine.replace("scontrol", _SCONTROL.format(folder=node.folder))
    assert len(node.updates()) == 1
    # As if slurmctld had been killed before it wrote that down.
    node.state.write_text("IDLE")
    assert len(node.updates()) == 1


NOTICE = '{"action": "terminate", "time": "2026-11-22T18:30:00Z"}'


def test_a_spot_notice_drains_the_node_for_good(node: Node) -> None:
    node.metadata(unrelated="")
    assert len(node.check()) == 3, "a token, the life cycle, and Slurm"
    os.utime(node.machine.path("/run/spr-cluster-health/no-imds"), (0, 0))
    # An error is not an answer: it is asked again.
    node.metadata(instance_life_cycle="spot")
    assert len(node.check()) == 3, "a token, the life cycle, and the notice"
    (quiet,) = node.check()
    assert quiet.endswith("/latest/meta-data/spot/instance-action")
    node.metadata(spot__instance_action=NOTICE)
    reason = "spot: EC2 takes it back at 2026-11-22T18:30:00Z"
    assert node.updates() == [f"scontrol update nodename=node1 state=drain reason={reason}"]
    assert node.updates() == []


@pytest.mark.parametrize("drained", ["disk: / has 0 MiB free", "by hand"])
def test_a_spot_notice_matters_more_than_other_reasons(node: Node, drained: str) -> None:
    node.state.write_text(f"IDLE+DRAIN Reason={drained} [root@x]")
    node.disk(1)
    node.metadata(instance_life_cycle="spot", spot__instance_action=NOTICE)
    (drain,) = node.updates()
    assert "reason=spot: " in drain


def test_a_token_that_has_expired_is_renewed(node: Node) -> None:
    node.metadata(instance_life_cycle="spot")
    node.check()
    node.machine.path("/run/spr-cluster-health/token").write_text("old\n")
    node.metadata(spot__instance_action=NOTICE)
    node.check()
    assert len(node.updates()) == 1


def test_on_demand_nodes_ask_for_no_notice(node: Node) -> None:
    node.metadata(instance_life_cycle="on-demand", spot__instance_action=NOTICE)
    node.check()
    assert node.check() == []


def test_a_node_that_was_away_learns_which_jobs_have_ended(node: Node) -> None:
    ours, heads = node.machine.path("/home/ubuntu/spr-jobs"), node.folder / "head/spr-jobs"

    def write(path: Path, age: int) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{age}")
        os.utime(path, (time.time() - age,) * 2)

    for job in ("ended", "again", "running"):
        write(ours / job / "run.sh", 90)
        write(ours / job / "environment.json", 90)
        for name in ("run.sh", "launch.json"):
            write(heads / job / name, 50 if job == "again" else 90)
    write(heads / "ended/end.json", 40)
    write(ours / "again/end.json", 60)
    write(heads / "new/cancelled", 40)
    seen = node.machine.path("/run/spr-cluster-health/seen")

    def catch_up() -> list[str]:
        before = len(node.machine.calls)
        node.check()
        return [call for call in node.machine.calls[before:] if call.startswith("ssh")]

    node.machine.replace("ssh", "exit 255")
    assert len(catch_up()) == 1
    assert not seen.exists(), "the head did not answer"
    node.machine.replace("ssh", _SSH.format(folder=node.folder))
    assert len(catch_up()) == 1
    assert {str(path.relative_to(ours)) for path in ours.rglob("*.json")} == {
        *("ended/end.json", "again/end.json"),
        *("again/environment.json", "running/environment.json"),
        *(f"{job}/launch.json" for job in ("ended", "again", "running")),
    }
    assert (ours / "again/run.sh").read_text() == "50"
    assert (ours / "new/cancelled").exists()
    assert catch_up() == []
    os.utime(seen, (time.time() - 60,) * 2)
    assert len(catch_up()) == 1
    node.machine.replace("hostname", "echo ip-10-0-0-10")
    os.utime(seen, (time.time() - 60,) * 2)
    assert catch_up() == []
