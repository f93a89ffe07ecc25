"""Two real ranks of an array, each on a node of its own: a folder, which the stand-in for ssh maps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jobs.worker.array.plan import ARRAY, ArrayPlan
from jobs.worker.runtime.events import parse_event
from tests.jobs.worker.started_ranks import REPOSITORY, started_ranks

ARGV = ("worker.array", "--folder=work", "--output=output")
# A node is a folder of the test's; one that is gone has none.
_SSH = """#!/bin/bash
node=${@: -2:1}; [ -d {root}/$node ] || exit 255
exec sh -c "$(sed 's#{root}/node[0-9]#{root}/'$node'#g' <<< "${@: -1}")"
"""
_HOSTS = "import os, socket\nsocket.gethostname = lambda: os.environ['SLURMD_NODENAME']\n"
# Every run of an element is one line; each tenth one fails.
_WORK = """echo $SPR_ARRAY_INDEX >> {root}/ran; sleep 0.02; echo $SPR_ARRAY_INDEX > $SPR_OUTPUT/own
[ $((SPR_ARRAY_INDEX % 10)) != 0 ] || { echo 'ValueError: no tenth one'; exit 3; }
"""


class Nodes:
    """Folders as nodes, with an array's plan on each."""

    def __init__(self, root: Path, script: str, plan: Mapping[str, Any]) -> None:
        self.root = root
        words = ("sh", "-c", script.replace("{root}", str(root)), *plan.pop("words", ()))  # type: ignore[attr-defined]
        self.plan = ArrayPlan(words, **plan)
        (root / "bin").mkdir()
        (root / "bin/ssh").write_text(_SSH.replace("{root}", str(root)))
        (root / "bin/ssh").chmod(0o755)
        (root / "bin/sitecustomize.py").write_text(_HOSTS)
        for name in ("node0", "node1", "node2"):
            (root / name / "work").mkdir(parents=True)
            (root / name / ARRAY).write_bytes(self.plan.render())
            launch = {"head": "node0", "pinning": {"node0": [], "node1": [], "node2": []}}
            (root / name / "launch.json").write_text(json.dumps(launch))

    def __getitem__(self, node: int) -> Path:
        return self.root / f"node{node}"

    @contextmanager
    def ranks(self, *nodes: int, resume: bool = False) -> Iterator[list[subprocess.Popen[str]]]:
        path = f"{self.root}/bin:{os.environ['PATH']}"
        code = f"{self.root}/bin:{REPOSITORY / 'jobs'}"
        own = [
            {"SLURMD_NODENAME": f"node{node}", "PATH": path, "PYTHONPATH": code} for node in nodes
        ]
        argv = [*ARGV, *(["--resume"] if resume else [])]
        with started_ranks([self[node] for node in nodes], argv, own) as running:
            yield running

    def run(self, *nodes: int, resume: bool = False) -> tuple[list[int], list[str]]:
        """Run to the end; return the exit codes and what the ranks printed."""
        with self.ranks(*nodes, resume=resume) as running:
            said = [process.communicate(timeout=120)[0] for process in running]
            return [process.returncode for process in running], said

    def ran(self) -> Counter[int]:
        return Counter(map(int, (self.root / "ran").read_text().split()))

    def reported(self, node: int) -> set[int]:
        """The elements whose end a node has published."""
        logs = (self[node] / "output.state/logs").glob("element-*.log")
        return {int(path.stem.partition("-")[2]) for path in logs}

    def results(self, node: int) -> Any:
        return json.loads((self[node] / "output/results.json").read_text())


def indexes(count: int) -> dict[int, dict[str, str]]:
    return {index: {} for index in range(1, count + 1)}


def wait_until(condition: Callable[[], object], running: Sequence[subprocess.Popen[str]]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        assert [process.poll() for process in running] == [None] * len(running)
        time.sleep(0.01)


@pytest.mark.parametrize("lost", [0, 1])
def test_each_of_100_elements_ends_once_though_a_node_dies(tmp_path: Path, lost: int) -> None:
    nodes = Nodes(tmp_path, _WORK, {"elements": indexes(100)})
    with nodes.ranks(0, 1) as running:
        wait_until(lambda: len(nodes.reported(0)) >= 30, running)
        running[lost].kill()
        said = running[1 - lost].communicate(timeout=60)[0]
    assert running[1 - lost].returncode == 1
    assert '"lost_peer": true' in said
    before = nodes.reported(0)
    assert 30 <= len(before) < 100
    nodes[lost].rename(tmp_path / "gone")

    first, other = (1, 2) if lost == 0 else (0, 2)
    codes, (said, _) = nodes.run(first, other, resume=True)

    assert codes[0] == 1
    results = nodes.results(first)
    assert [each["element"] for each in results["elements"]] == [*range(1, 101)]
    assert results["failed"] == [*range(10, 101, 10)]
    assert all(each["exit_code"] == 3 for each in results["elements"] if each["element"] % 10 == 0)
    assert {each["host"] for each in results["elements"]} == {"node0", "node1", "node2"}
    ran = nodes.ran()
    assert {*ran} == {*range(1, 101)}
    assert {index for index in before if ran[index] != 1} == set()
    for index in range(1, 101):
        assert (nodes[first] / f"output/elements/{index}/own").read_text() == f"{index}\n"
    # The other node keeps a second copy of what it ran, but not among its results.
    assert not (nodes[other] / "output/elements").exists()
    events = [event for line in said.splitlines() if (event := parse_event(line))]
    (error,) = (event for event in events if event["event"] == "error")
    assert error["message"] == "10 of 100 elements failed: 10, 20, 30, 40, 50, …"
    assert error["hint"].endswith(" the same command with --array 10,20,30,40,50,60,70,80,90,100")
    last = [event for event in events if event["event"] == "elements"][-1]
    assert (last["done"], last["failed"], last["total"]) == (100, 10, 100)
    assert "element 100 failed: sh ended with exit code 3: ValueError: no tenth one" in said
