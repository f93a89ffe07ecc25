"""`spr-cluster verify` against a simulated AWS: verdicts, remedies, exit codes."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest
from rich.console import Console

from cluster.cli.verify import PROGRAMS, build_table, list_remedies
from cluster.verify.machine import check_governor
from cluster.verify.results import Verdict
from infra.errors import HostError
from provision.host import Result
from tests.cluster.verify.fleet import NODES, judge
from tests.cluster.verify.test_nodes import DEFECTS
from tests.harness.command_line import CommandLine, CommandResult

_UP = "up --nodes 3 --yes"


@pytest.fixture
def cluster(line: CommandLine) -> CommandLine:
    line.begin("--nodes", "3")
    return line


def change(line: CommandLine, rank: int, **values: Any) -> None:
    line.cloud.change_machine(line.ids()[rank], **values)


def verify(line: CommandLine, *options: str, code: int = 0) -> CommandResult:
    result = line.run("verify", *options)
    assert result.code == code, result.err + result.out
    return result


def checks(line: CommandLine, *options: str, code: int = 0) -> list[dict[str, Any]]:
    found = json.loads(verify(line, "--json", *options, code=code).out)
    return [dict(each) for each in found["checks"]]


def found_by(found: list[dict[str, Any]], check: str, node: str = "cluster") -> dict[str, Any]:
    """The only result of a check."""
    (result,) = [c for c in found if (c["node"], c["check"]) == (node, check)]
    return result


def wrong(found: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    bad = ("warn", "fail")
    return [(c["node"], c["check"], c["verdict"]) for c in found if c["verdict"] in bad]


def test_a_healthy_cluster_passes_and_nothing_is_changed(cluster: CommandLine) -> None:
    before = cluster.changes

    result = verify(cluster)

    assert cluster.changes == before
    assert "0 failed, 0 warnings" in result.out
    assert "compared with r7iz.metal-16xl" in result.out
    assert "a rank on each of 3 nodes, torch 2.13.0+cpu" in result.out
    assert "no AMX" not in result.out
    assert "→" not in result.out


def test_a_defect_fails_with_its_node_check_and_remedy(cluster: CommandLine) -> None:
    change(cluster, 1, health={"tcmalloc": None})
    change(cluster, 2, health={"said": {check_governor.command: "powersave"}})

    result = verify(cluster, code=1)

    assert "fail: tcmalloc on node1\n  → spr-cluster ssh --name spr node1 -- " in result.out
    assert "1 failed, 1 warning" in result.out
    assert re.fullmatch(r"1 of \d+ checks failed: tcmalloc on node1", result.message)
    found = checks(cluster, "--no-bandwidth", code=1)
    assert wrong(found) == [("node2", "governor", "warn"), ("node1", "tcmalloc", "fail")]
    assert not [c for c in found if c["check"] == "bandwidth"]
    change(cluster, 1, health={})
    verify(cluster)  # a warning is not a failure
    change(cluster, 0, fate="no-ssh")
    assert verify(cluster, code=1).message.startswith("[node0] no SSH at")


@pytest.mark.parametrize(
    ("options", "code", "verdict"), [([], 1, "fail"), (["--allow-no-amx"], 0, "warn")]
)
def test_a_node_without_amx_is_never_ok(
    line: CommandLine, options: list[str], code: int, verdict: str
) -> None:
    line.must(*_UP.split(), *options)
    change(line, 1, fate="no-amx")

    result = verify(line, code=code)

    assert "no AMX on node1." in result.out
    assert wrong(checks(line, code=code)) == [("node1", "amx", verdict)]
    assert wrong(checks(line, "--judge-hardware", code=1)) == [("node1", "amx", "fail")]


def test_a_node_that_the_head_cannot_reach_is_probed_from_here(cluster: CommandLine) -> None:
    change(cluster, 1, mesh="another")

    found = checks(cluster, code=1)

    assert wrong(found) == [("node1", "ssh", "fail")]
    why = "the head can't connect over SSH: no route; but this machine can"
    assert found_by(found, "ssh", "node1")["found"] == why
    assert found_by(found, "amx", "node1")["verdict"] == "ok"
    untested = "not tested: the head can't connect to node1"
    assert found_by(found, "mpirun")["found"] == untested


def test_an_incomplete_cluster_fails(cluster: CommandLine) -> None:
    cluster.lose(cluster.ids()[1])

    found = checks(cluster, code=1)

    nodes = found_by(found, "nodes")
    assert (nodes["verdict"], nodes["found"]) == ("fail", "2 of 3 running")
    # Nothing is wrong with the others.
    assert wrong(found) == [("cluster", "nodes", "fail")]
    assert nodes["remedy"].endswith("\nspr-cluster repair --name spr")
    assert {c["node"] for c in found if c["check"] == "amx"} == {"node0", "node2"}
    assert not [c for c in found if c["check"] in ("names", "ports")]
    silent = cluster.ids()[1]
    cluster.cloud.break_ssh(silent)
    failed = [("cluster", "nodes", "fail"), ("node2", "ssh", "fail")]
    assert wrong(checks(cluster, code=1)) == failed
    cluster.cloud.mend_ssh(silent)
    cluster.must("up", "--nodes", "1", "--yes")
    assert found_by(checks(cluster), "pairs")["found"] == "a single node has no peers"


def test_a_running_job_is_not_disturbed(cluster: CommandLine) -> None:
    cluster.cloud.change_machine(cluster.ids()[0], job="squad-1")
    cluster.stage("node0", "bin/mpirun", HostError("node0", "mpirun beside a job"))

    found = checks(cluster)

    launcher = found_by(found, "mpirun")
    assert (launcher["verdict"], "job squad-1 is running" in launcher["found"]) == ("skipped", True)
    assert not [c for c in found if c["check"] == "bandwidth"]

    why = "slurm_load_partitions: Unable to contact slurm controller"
    cluster.stage("node0", "^echo; timeout 20 squeue", Result(1, "", why))
    cluster.stage("node0", "# asking the queue", Result(0, why, ""))
    found = checks(cluster, code=1)

    assert wrong(found) == [("cluster", "queue", "fail")]
    launcher = found_by(found, "mpirun")
    assert launcher["verdict"] == "skipped"
    assert launcher["found"].endswith(": a job may be running")


def test_up_reports_problems_at_the_end(line: CommandLine) -> None:
    line.begin("--nodes", "3")
    change(line, 1, health={"versions": {"torch": "2.6.0"}})
    fails = {"disk_size": None}
    change(line, 2, health=fails)  # the probe fails there, and on the head at first
    probes = iter([fails, {}])
    line.cloud.steps.before["health of all nodes"] = lambda: change(line, 0, health=next(probes))
    before = line.ids()

    result = line.must("up", "--nodes", "3", "--yes")

    assert line.ids() == before
    start = (
        "3 of 3 nodes reachable from the head, 2 with AMX; problems: node2: ssh: the probe failed"
    )
    assert start in result.err
    assert "; node1: stack: " in result.err
    assert "(details: spr-cluster verify --name spr)" in result.err


def test_at_80_columns_no_word_and_no_command_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    for change, *_ in DEFECTS:
        results = [r for r in judge(node1=change) if r.verdict in (Verdict.WARN, Verdict.FAIL)]
        console = Console(width=80, record=True, file=io.StringIO())

        console.print(build_table(results, len(NODES)))
        table, lines = console.export_text(), "\n".join(list_remedies(results)).splitlines()

        (result,) = results
        assert all(len(line) <= 80 for line in table.splitlines())
        assert set(f"{result.found} {result.wanted}".split()) <= set(table.split())
        assert set(result.remedy.split()) <= set(" ".join(lines).split())
        commands = [line for line in result.remedy.splitlines() if line.startswith(PROGRAMS)]
        assert commands == [t for line in lines if (t := line.lstrip(" →")).startswith(PROGRAMS)]
        assert all(len(line) <= 80 or line.lstrip(" →") in commands for line in lines)
