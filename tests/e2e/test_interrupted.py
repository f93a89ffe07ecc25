"""A rank dies in the midst of a job on real nodes, and the resumed job is the one that never did."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import LiveCluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

JOB = ("train", "squad", "--demo", "--epochs", "24", "--checkpoint-every", "7")


def losses(results: Path) -> list[list[tuple[int, float]]]:
    """Of every rank, step by step."""
    files = [results / "metrics" / f"rank-{rank}.jsonl" for rank in range(3)]
    lines = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return [[(each["step"], each["loss"]) for each in rank] for rank in lines]


def wait_for_step(job: subprocess.Popen[str], wanted: int) -> None:
    assert job.stdout is not None
    result = []
    for line in job.stdout:
        result.append(line)
        step = re.search(r"step (\d+)/", line)
        if step and int(step[1]) >= wanted:
            return
    raise AssertionError("".join(result))


def test_a_killed_and_resumed_job_learns_the_same_to_the_bit(
    cluster: LiveCluster, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    cluster.cli.run(*JOB, "--results", str(whole))
    job = cluster.cli.start(*JOB, "--results", str(killed))
    wait_for_step(job, 30)

    cluster.cli.ssh("node1", "pkill -KILL -f '[s]quad --model'")
    rest, _ = job.communicate(timeout=120)
    assert job.returncode == 1, rest

    done = cluster.cli.run("train", "squad", "--resume", "--results", str(killed))

    after = re.search(r"resuming after step (\d+) of", done.stderr)
    assert after, done.stderr
    assert int(after[1]) >= 28
    assert losses(killed) == losses(whole)
    results = [json.loads((each / "results.json").read_text()) for each in (whole, killed)]
    assert results[0]["loss_curve"] == results[1]["loss_curve"]
    assert [each["resumed_after"] for each in results] == [[], [int(after[1])]]
    logs = [(killed / "logs" / f"rank-{rank}.log").read_text() for rank in range(3)]
    assert "@spr" in logs[0]
    assert "goes on" not in logs[1]
    assert (killed / "log.earlier").read_text()
    assert not (killed / "checkpoints").exists()
    refused = cluster.cli.run("train", "squad", "--resume", after_job(done.stderr), check=2)
    assert "has nothing to resume: it is finished" in refused.stderr


def after_job(text: str) -> str:
    """The job's id."""
    found = re.search(r"job (squad-[\d-]+) resumes", text)
    assert found
    return found[1]
