"""What a rank writes into the job's folder: the figures of its steps, and its own log."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jobs.worker.runtime.errors import TrainingError
from jobs.worker.runtime.output import FLUSH_SECONDS, Metrics, StepFigures, new_file, state_folder
from tests.fakes import FakeClock


def figures(step: int) -> StepFigures:
    return StepFigures(step, step / 2, 1 / 3, 1e-4, 4, 90, 96, {"data": 1e-9, "forward": 0.25})


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (state_folder(folder) / "metrics" / "rank-3.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_figures_are_written_every_few_seconds_and_at_the_end(tmp_path: Path) -> None:
    clock = FakeClock()
    with Metrics(tmp_path, 3, print, clock.monotonic) as metrics:
        metrics.begin(0)
        metrics.add(figures(1))
        assert lines(tmp_path) == []
        clock.sleep(FLUSH_SECONDS)
        metrics.add(figures(2))
        assert len(lines(tmp_path)) == 2
        metrics.add(figures(3))
    assert lines(tmp_path)[0] == {
        "step": 1,
        "time": 0.5,
        "loss": 1 / 3,
        "lr": 1e-4,
        "samples": 4,
        "tokens": 90,
        "padded": 96,
        "seconds": {"data": 0.0, "forward": 0.25},
    }
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]


def test_a_disk_full_for_a_while_loses_no_line_and_no_training(tmp_path: Path) -> None:
    notes: list[str] = []
    with Metrics(tmp_path, 3, notes.append) as metrics:
        metrics.begin(0)
        metrics.add(figures(1))
        metrics.flush()
        with file_size_limit(
            (state_folder(tmp_path) / "metrics" / "rank-3.jsonl").stat().st_size + 10
        ):
            for step in (2, 3):
                metrics.add(figures(step))
                metrics.flush()
        metrics.add(figures(4))
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]
    (warning,) = notes
    assert warning.endswith("rank-3.jsonl can't be written: File too large")


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Keep this process's files from growing beyond ``size``."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_metrics_that_can_not_be_written_are_reported_before_training(tmp_path: Path) -> None:
    state_folder(tmp_path).mkdir()
    (state_folder(tmp_path) / "metrics").write_text("")
    with pytest.raises(TrainingError, match=r"rank-3\.jsonl can't be written"):
        Metrics(tmp_path, 3, print).begin(0)


@pytest.mark.parametrize(("resumed", "kept"), [(0, []), (2, [1, 2]), (9, [1, 2, 3])])
def test_a_resumed_run_records_no_step_twice(tmp_path: Path, resumed: int, kept: list[int]) -> None:
    with Metrics(tmp_path, 3, print) as metrics:
        metrics.begin(0)
        for step in (1, 2, 3):
            metrics.add(figures(step))
    path = state_folder(tmp_path) / "metrics" / "rank-3.jsonl"
    path.write_text(path.read_text() + '{"step": 4, "ti')

    Metrics(tmp_path, 3, print).begin(resumed)

    assert [line["step"] for line in lines(tmp_path)] == kept


_BEGIN = """
import sys
from pathlib import Path
from worker.runtime.output import keep_log

keep_log(Path(sys.argv[1]), int(sys.argv[2]), append=True)
"""


@pytest.mark.parametrize(
    ("nodes", "former", "left"),
    [
        ("node0,node1", [4, 5], {2: 4, 3: 5}),
        ("node0,node1", [1, 2], {2: 1, 3: 2}),
        ("node0,node1", [1, 4, 5], {2: 1, 3: 4, 4: 5}),
        ("node0,node1", [2, 3], {2: 2, 3: 3}),
        ("node0,node1", [0, 2, 3, 10], {2: 2, 3: 3}),
        ("", [4, 5], {4: 4, 5: 5}),
    ],
    ids=["lost another node", "another node", "with gaps", "as before", "other", "shared folder"],
)
def test_a_nodes_ranks_continue_the_files_of_those_that_it_had_before(
    node: Path, node_environ: dict[str, str], nodes: str, former: list[int], left: dict[int, int]
) -> None:
    state = state_folder(node)
    for folder, end in (("logs", "log"), ("metrics", "jsonl")):
        (state / folder).mkdir(parents=True)
        for rank in former:
            (state / folder / f"rank-{rank}.{end}").write_text(f"{rank}\n")
    place = {"PMI_SIZE": "4", "SPR_NODES": nodes, "MPI_LOCALNRANKS": f"{len(left)}"}
    for local in reversed(range(len(left))):  # they start in any order
        place |= {"PMI_RANK": f"{2 + local}", "MPI_LOCALRANKID": f"{local}"}
        argv = [sys.executable, "-c", _BEGIN, str(node), place["PMI_RANK"]]
        subprocess.run(argv, env={**node_environ, **place}, check=True)
    for folder, end in (("logs", "log"), ("metrics", "jsonl")):
        found = {path.name: path.read_text() for path in (state / folder).iterdir()}
        kept = {f"rank-{rank}.{end}": f"{old}\n" for rank, old in left.items()}
        assert {name: text for name, text in found.items() if text} == kept


_RANK = """
import os, signal, sys, threading
from pathlib import Path
from worker.runtime.output import keep_log

told = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: told.set())
keep_log(Path(sys.argv[1]), 0, append=False)
# At once: it may be just starting.
os.kill(int(Path("/proc/thread-self/children").read_text()), signal.SIGTERM)
print("step 1", flush=True)
# Not signal.pause, for which the signal may come too early.
if told.wait(60):
    print("a checkpoint is saved")
"""


def test_a_signal_to_all_processes_of_a_job_costs_no_line(
    node: Path, node_environ: dict[str, str]
) -> None:
    """As Slurm's: it finds processes by their parents, or by their cgroup."""
    argv = [sys.executable, "-c", _RANK, str(node)]
    with subprocess.Popen(argv, env=node_environ, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        lines = [rank.stdout.readline()]
        children = Path(f"/proc/{rank.pid}/task/{rank.pid}/children").read_text().split()
        for pid in (*map(int, children), rank.pid):
            os.kill(pid, signal.SIGTERM)
        lines += rank.stdout.readlines()

    assert len(children) == 1
    assert rank.returncode == 0
    assert lines == ["step 1\n", "a checkpoint is saved\n"]
    assert (node.with_name(f"{node.name}.state") / "logs/rank-0.log").read_text() == "".join(lines)


_PIECES = """
import sys
from pathlib import Path
from worker.runtime.output import keep_log

rank = sys.argv[2]
keep_log(Path(sys.argv[1]), int(rank), append=False)
for _ in range(200):
    print("rank", rank, "prints", "pieces")
print("asks", end="?")
sys.stdin.read()
"""


def test_lines_of_several_ranks_are_whole_and_a_question_is_seen(
    node: Path, node_environ: dict[str, str]
) -> None:
    """Unbuffered, ``print`` writes each piece by itself [tried: without this, the lines mix]."""
    environ = {**node_environ, "PYTHONUNBUFFERED": "1"}
    reading, writing = os.pipe()
    argvs = [[sys.executable, "-c", _PIECES, str(node), str(rank)] for rank in range(2)]
    ranks = [
        subprocess.Popen(argv, env=environ, stdin=subprocess.PIPE, stdout=writing) for argv in argvs
    ]
    os.close(writing)
    printed = b""
    while printed.count(b"asks?") < len(ranks) and (text := os.read(reading, 1 << 16)):
        printed += text
    os.close(reading)
    for rank in ranks:
        rank.communicate()

    lines = printed.replace(b"asks?", b"").decode().splitlines()
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert sorted(lines) == [f"rank {rank} prints pieces" for rank in (0, 1) for _ in range(200)]


def test_a_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with new_file(pipe) as path:
        assert path == pipe
    assert pipe.is_fifo()
