"""A part of the long sweeps in every test run, all of them in `make test-full`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[2]
# Each process of a sweep begins with an uninterrupted run.
_ALONE = ("--jobs=1",)


def run_benchmark(name: str, *options: str) -> dict[str, Any]:
    """A benchmark's last line; it fails with what the benchmark has told."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *options],
        cwd=_ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("scenarios", "every"), [(("cold", "grow"), 150), (("move", "replace"), 300)]
)
def test_up_and_down_recover_from_a_kill(scenarios: tuple[str, ...], every: int) -> None:
    chosen = [f"--scenario={each}" for each in scenarios]
    result = run_benchmark("kill_sweep", *_ALONE, *chosen, f"--every={every}")

    assert result["recovered_percent"] == 100
    assert result["kills"] >= 2 * len(scenarios)
    assert all(result["points"][each]["calls"] > 20 for each in scenarios)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("scenarios", "every"), [(("new", "abandoned"), 900), (("again",), 1000), (("repair",), 100)]
)
def test_of_two_commands_at_once_one_owns_the_cluster(
    scenarios: tuple[str, ...], every: int
) -> None:
    chosen = [f"--scenario={each}" for each in scenarios]
    result = run_benchmark("race_sweep", *_ALONE, *chosen, f"--every={every}")

    assert result["missed"] == []
    assert result["runs"] >= len(scenarios)


@pytest.mark.timeout(600)
def test_no_weather_leaves_anything_behind() -> None:
    result = run_benchmark("storm", *_ALONE, "--runs=3")

    assert result["verified"] + result["clear_failures"] == 3
    assert result["verified"] > 0
    assert result["missed"] == []
    assert 99 < result["budget_spent_percent"] <= 100


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
