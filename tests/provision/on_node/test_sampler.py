"""The end of a metrics file, and what a node shows while a user watches."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from provision.on_node import sampler
from provision.on_node.sampler import Sampler, read_tail
from provision.run_on_nodes import send
from tests.jobs.top.samples import JOB, NodeProcess, running_rank, write_metrics


def look(path: Path, later: float = 0.0) -> dict[str, object]:
    return read_tail(str(path), path.stat().st_mtime + later)


@pytest.mark.parametrize("steps", [30, 20_000])
def test_figures_are_averages_over_the_last_steps(tmp_path: Path, steps: int) -> None:
    path = write_metrics(tmp_path, 0, steps)
    with path.open("a") as file:
        file.write('{"step": 99999, "ti')  # not whole yet

    assert look(path, later=1.5) == {
        "step": steps,
        "loss": 2.5,
        "age_s": 1.5,
        "samples_per_second": 40.0,
        "communication": 0.2,
        "own_seconds": 0.08,
    }


def test_slow_steps_are_averaged_over_two(tmp_path: Path) -> None:
    path = write_metrics(tmp_path, 0, 3)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**row, "time": 60.0 * row["step"]}) + "\n" for row in rows))

    assert look(path)["samples_per_second"] == pytest.approx(4 / 60, abs=1e-3)
    # Some jobs do not split their time.
    figures = look(write_metrics(tmp_path, 1, 3, seconds={}))
    assert figures.keys() == {"step", "loss", "age_s", "samples_per_second"}


def test_a_missing_file_and_damaged_lines_give_no_figures(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    assert read_tail(str(path), 0.0) == {}
    bad = ["{", "[]", "null", '{"step": 1}', "[" * 5000, '{"step": 1, "time": Infinity}']
    path.write_text("\n".join(bad) + "\n")
    assert look(path) == {}
    assert look(write_metrics(tmp_path, 0, 3, loss=float("nan")))["loss"] is None
    assert look(write_metrics(tmp_path, 1, 1, samples=float("inf"))) == {}


STAT = "cpu 0 0 0 0 0 0 0 0\ncpu0 {} 0 0 {} 0 0 0 0\ncpu1 0 0 0 {} 0 0 0 0\nintr 5\n"
NET = "h\nh\n lo: 5 0 0 0 0 0 0 0 5\n ens5: {} 0 0 0 0 0 0 0 {}\n br0: 9 0 0 0 0 0 0 0 9\n"


def begin(jobs: Path, *, silence_s: float | None = None) -> NodeProcess:
    question = json.dumps({"interval_s": 0.1, "jobs": str(jobs)})
    text = send(sampler, lines=[question]).stdin
    if silence_s is not None:
        text = text.replace("SILENCE_S = 30", f"SILENCE_S = {silence_s}")
    return NodeProcess.start(text)


def test_a_look_shows_what_changed_since_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc, devices = tmp_path / "proc", tmp_path / "devices"
    (proc / "net").mkdir(parents=True)
    (devices / "ens5/device").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 60 kB\n")
    (proc / "stat").write_text(STAT.format(10, 10, 20))
    (proc / "net/dev").write_text(NET.format(1000, 500))
    now = [100.0]
    monkeypatch.setattr("provision.on_node.sampler.time.monotonic", lambda: now[0])
    node = Sampler(str(tmp_path / "spr-jobs"), str(proc), str(devices))

    now[0] += 2
    (proc / "stat").write_text(STAT.format(90, 30, 120))
    (proc / "net/dev").write_text(NET.format(5000, 1500))

    assert node.look() == {
        "busy": 40.0,
        "groups": [{"name": "rest", "ranks": [], "job": "", "cpus": "", "count": 2, "busy": 40.0}],
        "memory": 102400,
        "available": 61440,
        "received": 2000,
        "sent": 500,
        "ranks": [],
    }


def test_the_real_sampler_describes_this_machine_and_a_job_that_runs(tmp_path: Path) -> None:
    write_metrics(tmp_path, 1, 30)
    # Such as those that the end of a job brings to the head from another node.
    write_metrics(tmp_path, 2, 30)
    write_metrics(tmp_path, 0, 30, "squad-of-another-node")
    with running_rank(tmp_path, 1), begin(tmp_path) as node:
        found = json.loads(next(iter(node)))

    assert [(rank["job"], rank["rank"], rank["step"]) for rank in found["ranks"]] == [(JOB, 1, 30)]
    assert found["memory"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < found["available"] < found["memory"]
    assert found["groups"][0]["name"] == "rank 1"
    assert 0 <= found["busy"] <= 100


@pytest.mark.parametrize("is_read", [True, False])
def test_it_ends_with_its_standard_input_or_when_its_output_is_not_read_any_more(
    tmp_path: Path, is_read: bool
) -> None:
    with begin(tmp_path) as node:
        next(iter(node))
        assert node.process.stdout is not None
        node.close() if is_read else node.process.stdout.close()
        assert node.process.wait(60) == 0


def test_it_ends_without_beats_and_goes_on_with_them(tmp_path: Path) -> None:
    """A connection that is cut does not end its standard input."""
    with begin(tmp_path, silence_s=1.0) as node:
        for _ in range(3):
            time.sleep(0.4)
            node.send("\n")
        assert node.process.poll() is None
        assert node.process.wait(60) == -signal.SIGALRM
