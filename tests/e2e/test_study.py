"""A study on two nodes: side by side, canceled, resumed, and its best model with all trials."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import TWO, LiveCluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)


def test_a_study_uses_all_nodes_and_repeats_no_trial(two: LiveCluster, tmp_path: Path) -> None:
    tune = f"--tune=learning-rate={','.join(map(str, RATES))}"
    options = (*TWO, "--ppn=1", "--epochs=40", "--digits=4096", "--results", str(tmp_path))
    job = two.cli.json("study", "digits", *options, tune, "--detach")["job"]

    until = time.monotonic() + 180
    while not (state := two.cli.json("jobs", job, *TWO))["checkpoint"]:
        assert state["state"] in ("queued", "running"), state
        assert time.monotonic() < until
        time.sleep(0.2)
    two.cli.run("cancel", job, *TWO)
    two.cli.run("train", "digits", "--resume", job, *TWO, "--results", str(tmp_path))

    log = (tmp_path / "job" / "log").read_text()
    (before,) = re.findall(r"(\d) of 6 trials have ended before", log)
    assert log.count(" of 6 have ended): accuracy ") == 6 - int(before) < 6
    results = json.loads((tmp_path / "results.json").read_text())
    assert sorted(each["options"]["learning_rate"] for each in results["trials"]) == [*RATES]
    assert {each["host"] for each in results["trials"]} == {*two.hostnames}
    (best,) = (each for each in results["trials"] if each["best"])
    assert results["accuracy"] == max(each["scores"]["accuracy"] for each in results["trials"])
    assert results["learning_rate"] == best["options"]["learning_rate"]
    assert (tmp_path / "model").is_dir()
    shown = two.cli.run("attach", job, *TWO, "--results", str(tmp_path)).stdout
    assert f"the best trial: --learning-rate {results['learning_rate']}" in shown
