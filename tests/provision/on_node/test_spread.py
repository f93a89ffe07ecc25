"""Folders on many nodes: here, each node is a home folder, and ``ssh`` runs its command there."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from provision.on_node import spread
from provision.run_on_nodes import send

# sshd starts in the login user's home folder.
_SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift 2; done
node=$1; shift
echo "$(basename "$HOME") $node" >> NODES/../connections
[ -d "NODES/$node" ] || { echo "ssh: no route to host" >&2; exit 255; }
[ ! -e "NODES/$node/hangs" ] || exec sleep 20
export HOME="NODES/$node"; cd "$HOME" && exec sh -c "$*"
"""


@pytest.fixture
def nodes(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path / "nodes"
    names = [f"node{number}" for number in range(getattr(request, "param", 4))]
    for name in names:
        (folder / name).mkdir(parents=True)
    (folder / "node0/hosts").write_text("".join(f"{name}\n" for name in names))
    ssh = tmp_path / "bin/ssh"
    ssh.parent.mkdir()
    ssh.write_text(_SSH.replace("NODES", str(folder)))
    ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
    return folder


def give(nodes: Path, *folders: dict[str, Any]) -> str:
    base = send(spread)
    plan = {"folders": folders, "nodes": None, "argv": base.argv, "source": base.stdin}
    program = send(spread, lines=[json.dumps(plan)])
    environ = {
        **os.environ,
        "HOME": str(nodes / "node0"),
        "PATH": f"{nodes.parent}/bin:{os.environ['PATH']}",
    }
    text = program.stdin.replace("_SILENT_S = 60", "_SILENT_S = 4")
    done = subprocess.run(
        program.argv, input=text, env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def arrives(nodes: Path, version: str) -> dict[str, Any]:
    folder = nodes / f"node0/spr-folders/.p-{version}.job"
    folder.mkdir(parents=True)
    (folder / "a.py").write_text(f"version {version}")
    (folder / "same.py").write_text("same")
    os.utime(folder / "same.py", (1, 1))
    return {
        "store": f"spr-folders/p-{version}",
        "arrives": f"spr-folders/.p-{version}.job",
        "last": ".last-p",
        "target": f"spr-jobs/{version}/work",
        "copied": True,
        "keep": 10,
    }


@pytest.mark.parametrize("nodes", [5], indirect=True)
def test_every_node_has_the_folder_in_its_job(nodes: Path) -> None:
    first = arrives(nodes, "1")
    assert give(nodes, first) == ""
    for node in nodes.iterdir():
        assert (node / "spr-jobs/1/work/a.py").read_text() == "version 1"
        (node / "spr-jobs/1/work/same.py").write_text("the program changed its copy")
    assert give(nodes, arrives(nodes, "2")) == ""
    for node in nodes.iterdir():
        assert (node / "spr-jobs/2/work/same.py").read_text() == "same"
        same = (node / "spr-folders/p-2/same.py").stat()
        assert same.st_nlink == 2 or node.name == "node0", "it was not sent again"
        assert not list(node.glob("spr-folders/.p*"))
        assert (node / "spr-folders/.last-p").resolve().name == "p-2"
    # The first node gives to a few of the four, and they to the others.
    connections = (nodes.parent / "connections").read_text().splitlines()
    given = {row.split()[1] for row in connections if row.startswith("node0 ")}
    assert given == {"node1", "node3", "node4"}
    (nodes / "node0/spr-folders/p-1").rename(nodes / "node0/spr-folders/.p-1.job")
    assert give(nodes, first) == "", "again, because an earlier try did not finish"
    (nodes / "node0/spr-folders/.p-2.other").mkdir()
    second = {"store": "spr-folders/p-2", "arrives": "spr-folders/.p-2.other", "last": ".last-p"}
    rest = {"target": "spr-jobs/3/work", "copied": True, "keep": 10}
    assert give(nodes, {**second, **rest}) == "", "while another job sent the same"
    assert (nodes / "node2/spr-jobs/3/work/a.py").exists()
    assert not list((nodes / "node0/spr-folders").glob(".p*"))


def test_nodes_that_are_gone_or_stop_answering_cost_no_other_node(nodes: Path) -> None:
    (nodes / "node1").rename(nodes.parent / "gone")
    (nodes / "node2/hangs").touch()

    said = give(nodes, arrives(nodes, "1"))

    assert "node1: ssh: no route to host\n" in said
    assert re.search(r"^node2: .*timeout after 4 seconds.*$", said, re.MULTILINE)
    assert len(said.splitlines()) == 2
    assert (nodes / "node3/spr-jobs/1/work/a.py").exists()


@pytest.mark.parametrize("nodes", [2], indirect=True)
def test_data_is_shared_by_all_jobs_and_follows_changes(nodes: Path) -> None:
    data = nodes / "node0/spr-data/d"
    data.mkdir(parents=True)
    (data / "x").write_text("1")
    place = "spr-data/d"
    folder = {"store": place, "arrives": place, "last": "", "copied": False, "keep": 0}
    assert give(nodes, {**folder, "target": "spr-jobs/1/work/data"}) == ""
    (data / "x").unlink()
    (data / "y").write_text("2")
    assert give(nodes, {**folder, "target": "spr-jobs/2/work/data"}) == ""
    for node in nodes.iterdir():
        for job in ("1", "2"):
            assert [path.name for path in (node / f"spr-jobs/{job}/work/data").iterdir()] == ["y"]


@pytest.mark.parametrize("nodes", [1], indirect=True)
def test_old_versions_are_removed_unless_a_job_needs_them(
    nodes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (0, 1):
        job = nodes / f"node0/spr-jobs/job-{number}"
        job.mkdir(parents=True)
        (job / "packages").symlink_to(nodes / f"node0/spr-folders/q-{number}")
    (nodes / "node0/spr-jobs/job-1/end.json").touch()
    for version in range(12):
        folder = nodes / f"node0/spr-folders/q-{version}"
        folder.mkdir(parents=True)
        os.utime(folder, (version + 1, version + 1))
    begun = nodes / "node0/spr-folders/.q-12.job"
    begun.mkdir()
    first = arrives(nodes, "1")
    assert give(nodes, first) == ""
    kept = {path.name for path in begun.parent.glob("[!.]*")}
    assert kept == {"p-1", "q-0", *(f"q-{version}" for version in range(3, 12))}
    assert begun.exists()
    tomorrow = time.time() + 25 * 3600
    monkeypatch.setattr("time.time", lambda: tomorrow)
    monkeypatch.chdir(nodes / "node0")
    spread.use(first)
    assert [path.name for path in begun.parent.glob(".*")] == [".last-p"]
    for gone in (".*", "[!.]*"):  # another job has renamed or removed it
        found = {gone: [Path("gone")]}
        monkeypatch.setattr(Path, "glob", lambda _, text, found=found: found.get(text, []))
        spread.use(first)
