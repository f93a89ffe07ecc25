"""The guard of a job that shares a node, on real processes of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from provision.on_node import limits
from provision.on_node.limits import Guard

_MIB = 1 << 20
Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Guard:
    """A guard of at most 128 MiB; the job's control group is a folder."""
    monkeypatch.setattr(limits, "_ask", lambda *_: "/spr.slice/spr-7.slice\n")
    monkeypatch.setattr(limits, "_JOBS", tmp_path / "jobs")
    monkeypatch.setattr(limits, "_KILL_S", 0.1)  # unlike a control group, the folder keeps them
    (tmp_path / "jobs/run-1").mkdir(parents=True)
    found = Guard("7", "run-1", 128)
    found.group = tmp_path / "group"
    return found


@pytest.fixture
def start(guard: Guard) -> Iterator[Start]:
    """Starts Python code in the job's group, which has begun when it returns."""
    started: list[subprocess.Popen[str]] = []

    def begin(code: str) -> subprocess.Popen[str]:
        script = f"import os, sys, time\n{code}\nprint(flush=True)\ntime.sleep(60)"
        argv = [sys.executable, "-I", "-S", "-c", script]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        scope = guard.group / f"spr-7-{process.pid}.scope"
        scope.mkdir(parents=True)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        (scope / "cgroup.procs").write_text("\n".join([str(process.pid), *children]) + "\n")
        return process

    yield begin
    for pid in guard.list_processes():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in started:
        process.communicate(timeout=10)


def test_a_job_without_a_control_group_has_no_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    for group in ("", "/", "/spr-17.slice"):
        monkeypatch.setattr(limits, "_ask", lambda *_, group=group: f"{group}\n")
        with pytest.raises(SystemExit, match=r"spr-7\.slice has no control group"):
            Guard("7", "run-1", 128)


def test_memory_above_the_limit_ends_every_process_of_the_job_and_says_why(
    guard: Guard, start: Start
) -> None:
    large, small = start(f"x = b'x' * {160 * _MIB}"), start("")
    guard.run()

    assert (large.wait(10), small.wait(10)) == (-9, -9)
    assert "more than its 0.1 GiB of memory; --memory gives" in guard.report.read_text()


def test_memory_that_forked_processes_share_counts_once(guard: Guard, start: Start) -> None:
    start(f"x = b'x' * {64 * _MIB}\nfor _ in range(3):\n    if not os.fork(): time.sleep(60)")
    pids = guard.list_processes()

    assert len(pids) == 4
    assert limits._measure(pids, "status", limits._RSS, set()) > 200 * _MIB
    assert guard.judge(pids) == ""


def test_files_in_shared_memory_count_and_go_with_the_job(guard: Guard, start: Start) -> None:
    file = Path(f"/dev/shm/spr-test-{id(guard)}")
    mine = start(f"f = open({str(file)!r}, 'wb', 0); f.write(bytes({40 * _MIB}))")
    guard.limit = 80 * _MIB
    try:
        assert guard.judge(guard.list_processes()) == ""
        mine.kill()
        mine.wait(10)
        guard.limit = 30 * _MIB  # what a process leaves there still takes memory
        assert "memory" in guard.judge([])
        guard.run()
        assert not file.exists()
    finally:
        file.unlink(missing_ok=True)


def test_too_many_processes_end_the_job(guard: Guard, start: Start) -> None:
    processes = [start("") for _ in range(3)]
    guard.most = 3
    assert guard.judge(guard.list_processes()) == ""
    guard.most = 2
    guard.run()

    assert [each.wait(10) for each in processes] == [-9] * 3
    assert guard.report.read_text() == "it had 3 processes, more than 2\n"


def test_a_full_disk_and_a_task_that_ends_do_not_end_the_guard(
    guard: Guard, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, scandir = start(""), os.scandir
    (gone := guard.group / "spr-7-1.scope").mkdir()

    def scan(path: Any) -> Any:
        if str(path) == str(gone):
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    monkeypatch.setattr(Path, "write_text", Mock(side_effect=OSError("No space left on device")))
    guard.most = 0
    guard.run()

    assert process.wait(10) == -9


def test_a_kill_by_the_kernel_is_explained(guard: Guard, tmp_path: Path) -> None:
    guard._events, guard._memory = tmp_path / "memory.events", tmp_path / "memory"
    version_1 = guard._memory / "spr-7-1.scope" / "memory.oom_control"
    version_1.parent.mkdir(parents=True)
    for file in (guard._events, version_1):
        file.write_text("low 0\nmax 31\noom 1\noom_kill 0\n")
        assert guard.judge([]) == ""
        file.write_text("low 0\nmax 31\noom 1\noom_kill 1\n")
        assert "more than its 0.1 GiB" in guard.judge([])
        file.unlink()


def test_the_guard_of_a_job_that_ends_by_itself_reports_nothing(guard: Guard) -> None:
    guard.report.write_text("of an earlier attempt")
    guard._is_over = True
    guard.run()
    assert not guard.report.exists()


@pytest.mark.parametrize(
    ("said", "warned"),
    [
        ({}, ""),
        ({"systemd-run": "Unit spr-guard-7.service was already loaded"}, ""),
        ({"busctl": "Failed to connect to bus"}, "and memory: Failed to connect to bus\n"),
        ({"systemd-run": "Access denied"}, "and memory: Access denied\n"),
    ],
)
def test_a_task_that_is_not_held_says_so_in_its_output(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    said: dict[str, str],
    warned: str,
) -> None:
    (cores := tmp_path / "cores").write_text('{"node1": [[0, 0], [0, 1]]}')
    started: list[Any] = []
    shown = {"show job": " Nodes=node1 CPU_IDs=0 Mem=100", "show hostnames": "node1"}
    monkeypatch.setattr(limits, "CORES", str(cores))
    monkeypatch.setattr(
        limits, "_ask", lambda *a: next((v for k, v in shown.items() if k in " ".join(a)), "")
    )

    def find_error(*words: Any) -> str:
        started.append(words)
        return next((error for word, error in said.items() if word in words), "")

    monkeypatch.setattr(limits, "_find_error", find_error)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    monkeypatch.delenv("SPR_CORES", raising=False)
    monkeypatch.setattr(sys, "argv", ["limits", "hold", "7", "1"])
    limits.main()
    start = "print warning: on node1, this job can take its neighbors' cores "
    assert capsys.readouterr().out == (start + warned if warned else "")
    # The guard of a job that systemd does not hold would watch the whole machine.
    assert ("systemd-run" in started[-1]) == ("busctl" not in said)

    cores.write_text('{"node1": [[0, 0]]}')  # all of the node's cores
    limits.main()
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("SPR_CORES", "1")
    limits.main()
    assert capsys.readouterr().out == (start + warned if warned else "")

    cores.unlink()
    limits.main()
    assert "FileNotFoundError" in capsys.readouterr().out
