"""`down` names running jobs and what exists only on the nodes, and asks before it removes them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from cluster.local_files import ClusterFiles
from cluster.slurm import job_queue
from infra.errors import HostError
from jobs.places.files import worker_files
from jobs.places.plan import FETCHED, JobPaths
from provision.host import Result
from tests.harness.command_line import CommandLine
from tests.jobs.context import SUBMITTED

_ASKS = "# listing what would be lost"
_LOST = "running squad-2\nwaiting a user's job\nmodel squad-1\ncheckpoint squad-0\nresults run-1\n"
_NO_TERMINAL = "this needs confirmation, but there is no terminal: {}\n  → --yes confirms"


class Keyboard(io.StringIO):
    def isatty(self) -> bool:
        return True


class Terminal:
    """Replaces ``sys``: a terminal with a user who answers, or presses Ctrl-C."""

    def __init__(self, answer: str | None) -> None:
        self.stdin = self.stdout = Keyboard(f"{answer}\n")
        self.stderr = Keyboard()
        if answer is None:
            self.stdin.readline = self._interrupt  # type: ignore[method-assign]

    def _interrupt(self, *_: Any) -> str:
        raise KeyboardInterrupt


@pytest.fixture
def tutor(line: CommandLine) -> CommandLine:
    """An idle cluster of two containers on this machine."""
    line.begin("--nodes", "2", "--cloud", "local", "--name", "tutor")
    return line


def test_what_would_be_lost_is_named_and_asked_about(tutor: CommandLine) -> None:
    tutor.stage("node0", _ASKS, Result(0, f"Welcome to Ubuntu\n{_LOST}", ""))
    before = tutor.changes

    result = tutor.run("down", "--name", "tutor")

    kept = (
        "Only on the nodes: the model of squad-1, the checkpoint of squad-0, the results of run-1. "
        "To keep results: spr-cluster fetch JOB --name tutor"
    )
    jobs = ("Job squad-2 is running.", "Job a user's job is waiting.")
    assert "\n".join(["", *jobs, kept, ""]) in f"\n{result.err}"
    message = _NO_TERMINAL.format(" ".join([*jobs, kept]))
    assert (result.code, result.message) == (2, message)
    assert tutor.changes == before
    assert tutor.must("down", "--name", "tutor", "--yes").out.startswith("Nothing left")


@pytest.mark.parametrize(("answer", "code"), [("n", 2), ("", 2), ("y", 0), (None, 130)])
def test_on_a_terminal_down_asks(
    tutor: CommandLine, monkeypatch: pytest.MonkeyPatch, answer: str | None, code: int
) -> None:
    def end(code: int) -> None:
        raise SystemExit(code)

    tutor.stage("node0", _ASKS, Result(0, _LOST, ""))
    monkeypatch.setattr("cluster.console.output.sys", Terminal(answer))
    monkeypatch.setattr("jobs.cli._exit_at_once", end)
    before, files = tutor.changes, ClusterFiles.of("tutor")

    assert tutor.run("down", "--name", "tutor").code == code
    assert (tutor.cloud.left() == []) is (code == 0)
    assert (tutor.changes == before) is files.key.exists() is (code != 0)
    assert files.user() is None


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("idle", ""),
        ("silent", "[node0] no SSH"),
        ("hangs", "no answer within 0.2 s"),
        ("stopped", "it is stopped"),
    ],
)
def test_a_head_that_is_idle_or_does_not_answer_does_not_stop_down(
    tutor: CommandLine, monkeypatch: pytest.MonkeyPatch, state: str, said: str
) -> None:
    monkeypatch.setattr(job_queue, "_DEADLINE_S", 0.2 if state == "hangs" else 10)

    def hang(_: Any) -> Result:
        time.sleep(3)
        return Result(0, _LOST, "")

    if state in ("silent", "hangs"):
        silent = HostError("node0", "no SSH at 172.31.0.5: timed out")
        tutor.stage("node0", _ASKS, silent if state == "silent" else hang)
    if state == "stopped":
        tutor.cloud.fake.backend.stop_instances([tutor.ids()[0]])
    begin = time.monotonic()

    result = tutor.must("down", "--name", "tutor")

    assert result.out == "Nothing left of cluster tutor.\n"
    assert tutor.cloud.left() == []
    asked = "The head could not be asked what would be lost: "
    assert f"{asked}{said}" in result.err if said else asked not in result.err
    assert state != "hangs" or time.monotonic() - begin < 3


def test_without_the_key_down_asks(tutor: CommandLine) -> None:
    ClusterFiles.of("tutor").key.unlink()

    refused = tutor.run("down", "--name", "tutor")

    assert refused.code == 2
    assert "asked what would be lost: the cluster's key is not on this machine" in refused.message
    assert tutor.cloud.left()
    assert tutor.must("down", "--name", "tutor", "--yes").out.startswith("Nothing left")


def test_workers_that_lost_their_head_are_not_removed_without_a_question(
    tutor: CommandLine,
) -> None:
    before = tutor.ids()
    tutor.cloud.fake.backend.terminate_instances([before[0]])

    refused = tutor.run("down", "--name", "tutor")

    assert refused.code == 2
    assert "it is gone; other nodes may have checkpoints" in refused.message
    assert tutor.ids() == before[1:]
    shown = tutor.must("status", "--name", "tutor").out
    assert "node1 " in shown
    assert "node0 " not in shown
    tutor.must("down", "--name", "tutor", "--yes")
    assert tutor.cloud.left() == []


def test_a_cluster_that_was_never_connected_is_not_asked(line: CommandLine) -> None:
    """No job can have run there, and its nodes may not answer for minutes."""
    line.cloud.faults('[[machine]]\nfate = "no-amx"\n')
    assert line.run("up", "--nodes", "2", "--cloud", "local").code == 1
    line.stage("node0", _ASKS, HostError("node0", "no SSH"))

    assert "could not be asked" not in line.must("down").err


# The script on the head, with a home folder in place of the head's


@pytest.fixture
def head(tmp_path: Path) -> Path:
    (tmp_path / "spr-jobs").mkdir()
    return tmp_path


def make_job(head: Path, job: str, *files: str) -> Path:
    """A job's folder: its files are an hour old."""
    folder = head / "spr-jobs" / job
    for name in ("output.state/logs/rank-0.log", "output.state/metrics/rank-0.jsonl", *files):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SUBMITTED.render())
        os.utime(path, (time.time() - 3600,) * 2)
    return folder


def find(head: Path, queue: str = "", code: int = 0) -> list[str]:
    """Run the script beside a ``squeue`` that prints this and ends with this exit code.

    A startup file has printed text without a newline.
    """
    (head / "squeue").write_text(f"#!/bin/sh\ncat <<'END'\n{queue}END\nexit {code}\n")
    (head / "squeue").chmod(0o755)
    done = subprocess.run(
        ["sh", "-c", f"printf title; {job_queue.list_losses()}"],
        env={**os.environ, "HOME": str(head), "PATH": f"{head}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stderr == ""
    title, *found = done.stdout.splitlines()
    assert title == "title"
    return found


def test_the_script_finds_what_was_never_fetched(head: Path) -> None:
    assert find(head) == []
    make_job(head, "bench-1")
    make_job(head, "run-1", "output/rank-0.json")
    model = "output/model/config.json"
    make_job(head, "squad-1", "job.json", model, "output/results.json")
    make_job(head, "squad-2", "job.json", "output.state/checkpoints/step-000007/state")

    assert find(head) == ["results run-1", "model squad-1", "checkpoint squad-2"]


def test_what_was_fetched_is_not_lost_unless_it_changed_since(head: Path) -> None:
    model = "output/model/config.json"
    job = make_job(head, "squad-1", "job.json", model, "output/results.json")
    of_workers = make_job(head, "run-1", "job.json")
    assert find(head) == ["results run-1", "model squad-1"], "the workers may have written more"
    (job / "fetched").touch()
    (of_workers / "fetched").touch()
    assert find(head) == []

    (job / model).touch()
    os.utime(job / "fetched", (time.time() - 60,) * 2)

    assert find(head) == ["model squad-1"]


def test_the_checkpoint_of_an_unfinished_job_is_never_fetched(head: Path) -> None:
    job = make_job(head, "squad-1", "job.json", "output.state/checkpoints/step-000007/state")
    (job / "fetched").touch()
    assert find(head) == ["checkpoint squad-1"]

    (job / "output").mkdir()
    (job / "output/results.json").write_text("{}")
    (job / "fetched").touch()
    assert find(head) == []


@pytest.mark.parametrize("name", ["model/checkpoint-500/w", "checkpoints/step-000500/w", "logs/x"])
def test_no_name_in_the_output_is_left_out(head: Path, name: str) -> None:
    job = make_job(head, "run-1", f"output/{name}")
    os.utime(job / "output" / name, (0, 0))
    (job / "end.json").write_text('{"state": "succeeded", "exit_code": 0}')
    assert find(head) == ["results run-1"]


def test_what_a_program_wrote_to_its_working_folder_is_lost(head: Path) -> None:
    outputs = {"run-1": None, "run-2": [], "run-3": ["*.pt"], "run-4": ["out"]}
    jobs = [make_job(head, name, "work/sent.py", "output.state/started") for name in outputs]
    for job in jobs:
        more = {"outputs": outputs[job.name]}
        (job / "job.json").write_text(json.dumps({"more": more}))
        for name, source in worker_files().items():
            (job / name).parent.mkdir(parents=True, exist_ok=True)
            (job / name).write_bytes(source.read_bytes())
    assert find(head) == []
    time.sleep(0.02)
    for job in jobs:
        (job / "work/out").mkdir()
        (job / "work/out/model.bin").write_text("model")
    assert sorted(find(head)) == ["results run-1", "results run-4"]

    for job in jobs:
        (job / "fetched").touch()
    assert find(head) == []


def test_a_queue_that_does_not_answer_is_not_an_empty_one(head: Path, tutor: CommandLine) -> None:
    make_job(head, "squad-1", "output/rank-0.json")
    found = find(head, "slurm_load_jobs error:\nno contact\n", code=1)
    assert found == ["queue slurm_load_jobs error: no contact", "results squad-1"]
    tutor.stage("node0", _ASKS, Result(0, "\n".join(found), ""))

    result = tutor.run("down", "--name", "tutor")

    assert result.code == 2
    assert (
        "The head could not be asked what would be lost: its queue does not answer: slurm_load_jobs "
        "error: no contact\nOnly on the nodes: the results of squad-1." in result.err
    )


def test_the_script_finds_jobs_in_the_queue(head: Path) -> None:
    for name in ("squad-1", "squad-2", "squad-12"):
        make_job(head, name, "output/rank-0.json")
    rows = (
        "7|RUNNING|node[0-1]|None|squad-1\n8|COMPLETING|node2|None|a user's job\n"
        "9|PENDING||Resources|squad-2\n"
    )
    assert find(head, rows) == [
        "running squad-1",
        "running a user's job",
        "waiting squad-2",
        "results squad-12",
    ]


def test_the_marker_lies_where_the_script_looks(head: Path) -> None:
    paths = JobPaths("squad-1", str(head))
    assert Path(paths.root, FETCHED) == head / "spr-jobs/squad-1/fetched"
    assert paths.record == str(head / "spr-jobs/squad-1/job.json")
