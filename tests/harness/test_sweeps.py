"""A part of the long sweeps in every test run, all of them in `make test-full`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[2]


def run_benchmark(name: str, *options: str) -> Any:
    """A benchmark's last line; it fails with what the benchmark has told."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *options],
        cwd=_ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def try_each(name: str, scenarios: Sequence[str]) -> Any:
    """Try a point of each scenario, in one process: to start it and its cloud takes longer."""
    chosen = [f"--scenario={each}" for each in scenarios]
    return run_benchmark(name, "--jobs=1", *chosen, "--every=10000")


@pytest.mark.timeout(600)
def test_up_and_down_recover_from_a_kill() -> None:
    scenarios = ("cold", "replace")
    result = try_each("kill_sweep", scenarios)

    assert result["recovered_percent"] == 100
    assert result["kills"] >= 2 * len(scenarios)
    assert all(result["points"][each]["calls"] > 20 for each in scenarios)


@pytest.mark.timeout(600)
def test_of_two_commands_at_once_one_owns_the_cluster() -> None:
    scenarios = ("abandoned", "repair")
    result = try_each("race_sweep", scenarios)

    assert result["missed"] == []
    assert result["runs"] >= len(scenarios)


@pytest.mark.timeout(600)
def test_no_weather_leaves_anything_behind() -> None:
    """The first run lives to the last; the second has a job. No other process shares them."""
    results = run_benchmark("storm", "--runs=2", "--jobs=1", "--job=0")

    assert [each["wrong"] for each in results] == [[]] * 2
    assert any(each["ok"] for each in results)
    assert 0.99 < max(each["spent"] for each in results) <= 1


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_every_point_of_the_sweep() -> None:
    assert run_benchmark("kill_sweep")["recovered_percent"] == 100


@pytest.mark.full
@pytest.mark.timeout(14400)
def test_every_interleaving_of_two_commands() -> None:
    assert run_benchmark("race_sweep")["missed"] == []


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_all_faults_at_once() -> None:
    assert run_benchmark("storm")["runs"] == 200


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_calls_of_large_clusters() -> None:
    assert run_benchmark("ec2_calls")["missed"] == []
