"""Plans that would take nodes from a running job, or rename them."""

from __future__ import annotations

import json

import pytest

from provision.host import Result
from tests.harness.command_line import CommandLine

_BUSY = (
    "job squad-1 is still running on this cluster\n  → wait for it to end, or save a checkpoint and "
    "end it: spr-cluster cancel squad-1 --name spr"
)


@pytest.fixture
def three(line: CommandLine) -> CommandLine:
    """A cluster of three nodes, all of which a job uses."""
    line.begin("--nodes", "3")
    line.cloud.change_machine(line.ids()[0], job="squad-1")
    return line


def change_job(line: CommandLine, **values: object) -> None:
    line.cloud.change_machine(line.ids()[0], **values)


@pytest.mark.parametrize(
    "job",
    [{"job_nodes": ["node0", "node1"]}, {"job_state": "PENDING", "job_nodes": []}, {"job": ""}],
    ids=["on other nodes", "waiting", "none"],
)
def test_nodes_that_no_job_uses_are_taken(three: CommandLine, job: dict[str, object]) -> None:
    change_job(three, **job)

    three.must("up", "--nodes", "2", "--yes")

    assert len(three.ids()) == 2
    found = "squad-1 running" if job.get("job_nodes") else "no job is running"
    assert found in three.must("events").out


def test_repair_beside_a_job_gives_a_lost_nodes_name_to_its_replacement(three: CommandLine) -> None:
    change_job(three, job_nodes=["node0", "node2"])
    head, lost, last = three.ids()
    three.lose(lost)

    repaired = json.loads(three.must("repair", "--yes", "--json").out)

    assert repaired["changed"] is True
    new = ({*three.ids()} - {head, last}).pop()
    names = {node["name"]: node["instance"] for node in repaired["nodes"]}
    assert names == {"node0": head, "node1": new, "node2": last}
    assert "Up to date: 3 nodes" in three.must("repair").out


def test_a_running_jobs_nodes_are_not_renamed(three: CommandLine) -> None:
    """The last node would become node1, and the job's mpirun knows it as node2."""
    change_job(three, job_nodes=["node0", "node2"])
    three.lose(three.ids()[1])

    result = three.run("up", "--nodes", "2", "--yes")

    assert (result.code, result.message) == (2, _BUSY)
    change_job(three, job_state="PENDING", job_nodes=[])
    done = json.loads(three.must("up", "--nodes", "2", "--yes", "--json").out)
    assert [node["name"] for node in done["nodes"]] == ["node0", "node1"]


def test_only_repair_takes_a_node_for_lost_that_this_machine_can_not_reach(
    three: CommandLine,
) -> None:
    # In Slurm's short form.
    row = "12|RUNNING|node[0,2]|None|squad-1\n13|PENDING||Resources|run-2\n"
    three.stage("node0", "^echo; timeout 20 squeue ", Result(0, row, ""))
    worker = three.ids()[2]
    three.cloud.change_machine(worker, fate="no-ssh")

    result = three.run("up", "--yes")

    assert result.code != 0
    assert "job squad-1 is still running" in result.message
    assert len(three.ids()) == 3
    three.must("repair", "--yes")
    assert worker not in three.ids()


def test_nothing_is_taken_if_the_head_can_not_be_asked(three: CommandLine) -> None:
    three.stage("node0", "^echo; timeout 20 squeue ", Result(1, "", "no controller"))
    before = three.changes
    result = three.run("up", "--nodes", "2", "--yes")
    assert result.message.startswith("[node0] Slurm does not answer: no controller")
    # A command would have to name the cluster.
    assert "→ `verify` shows how to start it again" in result.err
    assert three.changes == before
    # Nothing is taken from a job by this.
    three.lose(three.ids()[2])
    three.must("repair", "--yes")
    assert len(three.ids()) == 3
