"""Two real ranks of an array, each on its own node: a folder, which the stand-in for ssh maps."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jobs.worker.array.coordinator import ArrayCoordinator, gather, read_ends
from jobs.worker.array.elements import ElementRunner, end_group
from jobs.worker.array.plan import ARRAY, ArrayPlan
from jobs.worker.pool.remote import Remote, serving
from jobs.worker.pool.stop import Stop
from jobs.worker.runtime.events import Events, parse_event
from jobs.worker.runtime.process import NODES
from tests.jobs.worker.started_ranks import REPOSITORY, started_ranks

ARGV = ("worker.array", "--folder=work", "--output=output")
# A node is a folder of the test's; one that is gone has none. The first connection is refused.
_SSH = """#!/bin/bash
mkdir {root}/refused 2>/dev/null && exit 255
node=${@: -2:1}; [ -d {root}/$node ] || exit 255
exec sh -c "$(sed 's#{root}/node[0-9]#{root}/'$node'#g' <<< "${@: -1}")"
"""
# Every run of an element that ends is one line; each fifth one fails. All wait for elements on another node,
# and the last 12 for those of a third one, which comes with the second attempt.
_WORK = """touch {root}/on-$SLURMD_NODENAME
until [ $(ls {root}/on-* | wc -l) -ge $((SPR_ARRAY_INDEX > 18 ? 3 : 2)) ]; do sleep 0.02; done
echo $SPR_ARRAY_INDEX >> {root}/ran; echo $SPR_ARRAY_INDEX > $SPR_OUTPUT/own
[ $((SPR_ARRAY_INDEX % 5)) != 0 ] || { echo 'ValueError: no fifth one'; exit 3; }
"""


class Nodes:
    """Folders as nodes, with an array's plan on each."""

    def __init__(
        self, root: Path, script: str, elements: Mapping[int, Mapping[str, str]], **more: Any
    ) -> None:
        self.root = root
        words = ("sh", "-c", script.replace("{root}", str(root)), *more.pop("words", ()))
        self.plan = ArrayPlan(words, elements, **more)
        (root / "bin").mkdir()
        (root / "bin/ssh").write_text(_SSH.replace("{root}", str(root)))
        (root / "bin/ssh").chmod(0o755)
        for name in ("node0", "node1", "node2"):
            for folder in ("work", "data"):
                (root / name / folder).mkdir(parents=True)
            (root / name / ARRAY).write_bytes(self.plan.render())
            launch = {"head": "node0", "pinning": {"node0": [], "node1": [], "node2": []}}
            (root / name / "launch.json").write_text(json.dumps(launch))

    def __getitem__(self, node: int) -> Path:
        return self.root / f"node{node}"

    @contextmanager
    def ranks(self, *nodes: int, resume: bool = False) -> Iterator[list[subprocess.Popen[str]]]:
        path = f"{self.root}/bin:{os.environ['PATH']}"
        shared = {"PATH": path, NODES: ",".join(f"node{node}" for node in nodes)}
        own = [{"SLURMD_NODENAME": f"node{node}", **shared} for node in nodes]
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

    def have_run(self) -> set[int]:
        """The nodes whose elements rank 0 has published, on the first node."""
        ends = (self[0] / f"elements/{index}/end.json" for index in self.reported(0))
        return {int(json.loads(each.read_text())["host"][-1]) for each in ends}

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
def test_each_of_30_elements_ends_once_though_a_node_dies(tmp_path: Path, lost: int) -> None:
    nodes = Nodes(tmp_path, _WORK, indexes(30))
    with nodes.ranks(0, 1) as running:
        wait_until(lambda: len(nodes.reported(0)) >= 10 and nodes.have_run() == {0, 1}, running)
        running[lost].kill()
        said = running[1 - lost].communicate(timeout=60)[0]
    assert running[1 - lost].returncode == 1
    assert '"lost_peer": true' in said
    before = nodes.reported(0)
    assert 10 <= len(before) <= 18
    nodes[lost].rename(tmp_path / "gone")

    # The new first node has nothing yet.
    first, other = (2, 1) if lost == 0 else (0, 2)
    codes, (said, _) = nodes.run(first, other, resume=True)

    assert codes[0] == 1
    results = nodes.results(first)
    assert [each["element"] for each in results["elements"]] == [*range(1, 31)]
    assert results["failed"] == [*range(5, 31, 5)]
    assert all(each["exit_code"] == 3 for each in results["elements"] if each["element"] % 5 == 0)
    assert {each["host"] for each in results["elements"]} == {"node0", "node1", "node2"}
    ran = nodes.ran()
    assert {*ran} == {*range(1, 31)}
    assert {index for index in before if ran[index] != 1} == set()
    for index in range(1, 31):
        assert (nodes[first] / f"output/elements/{index}/own").read_text() == f"{index}\n"
    events = [event for line in said.splitlines() if (event := parse_event(line))]
    (error,) = (event for event in events if event["event"] == "error")
    assert error["message"] == "6 of 30 elements failed: 5, 10, 15, 20, 25, …"
    assert error["hint"].endswith(" the same command with --array 5,10,15,20,25,30")
    last = [event for event in events if event["event"] == "elements"][-1]
    assert (last["done"], last["failed"], last["total"]) == (30, 6, 30)
    assert "element 30 failed: sh ended with exit code 3: ValueError: no fifth one" in said


def test_sigterm_reaches_the_elements_and_interrupted_ones_run_again(tmp_path: Path) -> None:
    script = """[ ! -e {root}/again ] || exit 0
    [ $SPR_ARRAY_INDEX != 1 ] || { touch $SPR_OUTPUT/own; exit 0; }
    trap 'echo saved > {root}/saved-$SPR_ARRAY_INDEX; exit 0' TERM
    touch {root}/started-$SPR_ARRAY_INDEX; sleep 60 & wait"""
    nodes = Nodes(tmp_path, script, indexes(5))
    with nodes.ranks(0, 1) as running:
        wait_until(lambda: len([*tmp_path.glob("started-*")]) == 2, running)
        running[1].send_signal(signal.SIGTERM)
        wait_until(lambda: len([*tmp_path.glob("saved-*")]) == 1, running)
        # With mpirun, its end would kill rank 0, which has to save what is known.
        time.sleep(0.5)
        assert running[1].poll() is None
        running[0].send_signal(signal.SIGTERM)
        said = [process.communicate(timeout=60)[0] for process in running]
    assert [process.returncode for process in running] == [143, 143], said
    saved = {path.name.partition("-")[2] for path in tmp_path.glob("saved-*")}
    assert saved == {path.name.partition("-")[2] for path in tmp_path.glob("started-*")}
    assert [each["element"] for each in nodes.results(0)["elements"]] == [1]
    (tmp_path / "again").touch()
    codes, (text, _) = nodes.run(1, 0, resume=True)
    assert codes == [0, 0]
    assert "1 of 5 elements have ended before" in text
    assert [each["element"] for each in nodes.results(1)["elements"]] == [1, 2, 3, 4, 5]
    # The results move to the new first node: the files of both would be fetched.
    assert (nodes[1] / "output/elements/1/own").exists()
    assert not (nodes[0] / "output/elements").exists()


def test_no_more_run_at_the_same_time_than_the_limit(tmp_path: Path) -> None:
    plan = ArrayPlan(("true",), indexes(2), limit=1)
    coordinator = ArrayCoordinator(plan, tmp_path, Events(0), ranks=2)
    assert [coordinator.ask(rank) for rank in (0, 1, 0, 0)] == [1, None, 2, None]
    assert not coordinator.is_over(), "their ends are not reported yet"


def test_an_element_is_alone_and_has_its_variables(tmp_path: Path) -> None:
    script = """sleep 300 & echo $! > $SPR_OUTPUT/left
    env > $SPR_OUTPUT/env; echo "$*" > $SPR_OUTPUT/words; pwd; echo to stderr >&2"""
    words = ("--", "--rate=$lr", "$SPR_ARRAY_INDEX", "$lr2", "$SPR_OUTPUT/x", "$HOME")
    nodes = Nodes(tmp_path, script, {7: {"lr": "1e-4", "seed": "a b"}}, words=words)
    codes, said = nodes.run(0, 1)
    assert codes == [0, 0], said
    output = nodes[0] / "output/elements/7"
    found = dict(
        line.split("=", 1) for line in (output / "env").read_text().splitlines() if "=" in line
    )
    wanted = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    wanted |= {"SPR_ARRAY_INDEX": "7", "lr": "1e-4", "seed": "a b"}
    wanted |= {"PMI_SIZE": "1", "SPR_IN_POOL": "1"}
    assert {name: found.get(name) for name in wanted} == wanted
    assert not {"MASTER_PORT", "MASTER_ADDR", "SPR_MARK", NODES} & found.keys()
    place = found["SPR_OUTPUT"]
    assert (output / "words").read_text() == f"--rate=1e-4 7 $lr2 {place}/x $HOME\n"
    log = (nodes[0] / "output.state/logs/element-7.log").read_text()
    assert log in [f"{nodes[node]}/work\nto stderr\n" for node in (0, 1)]
    (end,) = nodes.results(0)["elements"]
    assert end["variables"] == {"lr": "1e-4", "seed": "a b"}
    assert (end["exit_code"], end["host"] in ("node0", "node1")) == (0, True)
    # What it left running is killed.
    wait_until(lambda: not Path("/proc", (output / "left").read_text().strip()).exists(), [])


def test_a_second_node_that_is_gone_costs_one_warning(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "sleep 0.1; touch $SPR_OUTPUT/own", indexes(5))
    nodes[1].rename(tmp_path / "gone")
    codes, (said,) = nodes.run(0)
    assert codes == [0], said
    assert said.count("can't be copied to node1; elements are only on node0") == 1
    assert len([*nodes[0].glob("output/elements/*/own")]) == 5


def test_a_missing_program_and_a_killed_one_fail(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "kill -9 $$", indexes(1), file="my runs.csv", limit=2)
    codes, (said, _) = nodes.run(0, 1)
    assert codes == [1, 0], said
    (end,) = nodes.results(0)["elements"]
    assert (end["exit_code"], end["message"].split(",")[0]) == (137, "sh was ended by signal 9")
    assert "the same command with --array 'my runs.csv:1%2'" in said
    for node in range(3):
        plan = ArrayPlan(
            ("$program", "-c", "exit 255"), {2: {"program": "no-such"}, 3: {"program": "sh"}}
        )
        (nodes[node] / ARRAY).write_bytes(plan.render())
    nodes.run(0, 1)
    ends = {each["element"]: each for each in nodes.results(0)["elements"]}
    assert (ends[2]["exit_code"], ends[2]["message"]) == (
        127,
        "no-such can't be run: No such file or directory",
    )
    assert ends[3]["message"] == "sh ended with exit code 255"


_ODD = """case $SPR_ARRAY_INDEX in 1) rmdir $SPR_OUTPUT;;
*) head -c 9M /dev/zero > $SPR_OUTPUT/big
  setsid -f sh -c "for i in \\$(seq 300); do echo x >> $SPR_OUTPUT/big; sleep 0.01; done" >/dev/null 2>&1;;
esac
touch {root}/on-$SLURMD_NODENAME; until [ $(ls {root}/on-* | wc -l) = 2 ]; do sleep 0.02; done
"""


def test_an_elements_odd_output_ends_no_other(tmp_path: Path) -> None:
    """One removes its folder, and others leave a process that still writes while tar reads."""
    nodes = Nodes(tmp_path, _ODD, indexes(4))
    codes, said = nodes.run(0, 1)
    assert codes == [0, 0], said
    assert [each["exit_code"] for each in nodes.results(0)["elements"]] == [0] * 4
    assert not (nodes[0] / "output/elements/1").exists()
    assert (nodes[0] / "output/elements/4/big").stat().st_size >= 9 << 20


@pytest.mark.parametrize(
    ("script", "denied", "code", "said"),
    [
        ("touch $SPR_OUTPUT/secret", os.R_OK, 0, "can't be kept: output/secret"),
        ("mkdir -p $SPR_OUTPUT/secret/a", os.X_OK, 0, "can't be kept: output/secret can't"),
        ("touch $SPR_OUTPUT/secret; exit 3", os.R_OK, 3, "exit code 3"),
    ],
)
def test_an_unreadable_file_is_its_elements_failure(
    tmp_path: Path, monkeypatch: Any, script: str, denied: int, code: int, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    # Root reads everything.
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != "secret" or not mode & denied)
    plan = ArrayPlan(("sh", "-c", script), indexes(1))
    args = Namespace(folder=".", packages="", imports="")
    rank: Any = SimpleNamespace(stop=Stop(end_group))
    end: Any = ElementRunner(rank, plan, args, ())._run(1)
    assert end == json.loads((tmp_path / "elements/1/end.json").read_text())
    assert (end["exit_code"], said in end["message"]) == (code or 1, True)


def test_output_that_can_not_be_kept_is_its_elements_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def refuse(source: Path, target: Path, **more: Any) -> None:
        if Path(source).name == "of-root":
            raise PermissionError(1, "Operation not permitted", str(source))
        link(source, target, **more)

    monkeypatch.setattr(os, "link", refuse)
    box = tmp_path / "elements/1"
    (box / "output").mkdir(parents=True)
    for name in ("output/of-root", "log"):
        (box / name).touch()
    end = {"element": 1, "exit_code": 0, "host": "a", "seconds": 1.0, "variables": {}}
    first = ArrayCoordinator(ArrayPlan(("true",), indexes(2)), tmp_path, Events(0))
    assert first.ask(0) == 1
    first.tell(end)
    (box / "end.json").write_text(json.dumps(end))
    again = ArrayCoordinator(ArrayPlan(("true",), indexes(2)), tmp_path, Events(0))
    for each in (first, again):
        assert each.failed == [1]
        assert "its output can't be kept: [Errno 1] Operation not perm" in each.ended[1]["message"]
    assert again.ask(0) == 2


def test_ranks_wait_for_one_that_copies_elements_first() -> None:
    coordinator: Any = SimpleNamespace(SERVED=("ask",), ask=lambda rank: rank + 1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    remote = Remote("127.0.0.1", port, Stop(lambda *_: None))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(remote.call, "ask", 6)
        time.sleep(0.3)
        assert not answer.done()
        with serving(coordinator, "127.0.0.1", port):
            assert answer.result(20) == 7


def test_an_element_that_can_not_be_read_whole_costs_no_later_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, "true", indexes(1))
    tar = f'#!/bin/sh\n{shutil.which("tar")} "$@" && case "$*" in *" - 1 "*) exit 2; esac\n'
    (tmp_path / "bin/tar").write_text(tar)
    (tmp_path / "bin/tar").chmod(0o755)
    for index in range(1, 101):
        (nodes[1] / f"elements/{index}").mkdir(parents=True)
        (nodes[1] / f"elements/{index}/end.json").write_text(json.dumps({"element": index}))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.chdir(nodes[0])
    (tmp_path / "refused").mkdir()
    gather(nodes[0], ["node1"])
    assert len(read_ends(nodes[0])) == 100


@pytest.mark.parametrize(
    "module", ["worker.array.__main__", "worker.study.__main__", "worker.study.coordinator"]
)
def test_a_rank_that_only_starts_others_loads_no_torch(module: str) -> None:
    heavy = {"torch"} if module.endswith("study.coordinator") else {"torch", "optuna"}
    code = f"import sys, {module}; print(*{heavy} & {{*sys.modules}})"
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY / "jobs")}
    argv = [sys.executable, "-c", code]
    assert subprocess.run(argv, env=environ, capture_output=True, check=True).stdout == b"\n"
