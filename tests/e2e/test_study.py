"""A study on two nodes: side by side, canceled, resumed, ended by its limit of time, and its best model."""

from __future__ import annotations

import json
import re
import time
from datetime import datetime
from pathlib import Path

import pytest

from tests.e2e.conftest import TWO, LiveCluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
SHORT, ENDLESS = [1, 2], 10_000


def test_a_canceled_study_continues_without_repeating_a_trial_and_ends_in_time(
    two: LiveCluster, tmp_path: Path
) -> None:
    # One trial takes half an hour, so that the study can't end before it is canceled.
    tune = f"--tune=epochs={','.join(map(str, (*SHORT, ENDLESS)))}"
    first = ("--detach", "--results", str(tmp_path / "first"))
    job = two.cli.json("study", "digits", *TWO, "--ppn=1", tune, *first)["job"]
    until = time.monotonic() + 180
    while not (state := two.cli.json("jobs", job, *TWO))["checkpoint"]:
        assert state["state"] in ("queued", "running"), state
        assert time.monotonic() < until
        time.sleep(0.2)
    two.cli.run("cancel", job, *TWO)

    folder = tmp_path / "second"
    ended = two.cli.json("jobs", job, *TWO)
    began, end = (datetime.fromisoformat(ended[name]) for name in ("began", "ended"))
    took = (end - began).total_seconds()  # it counts
    limit = f"--max-time={(took + 62) / 60:.2f}m"
    shown = two.cli.run(
        *("train", "digits", "--resume", job, *TWO, limit, "--results", str(folder))
    )

    log = (folder / "job" / "log").read_text()
    (before,) = map(int, re.findall(r"(\d) of 3 trials have ended before", log))
    results = json.loads((folder / "results.json").read_text())
    tried = [each["options"]["epochs"] for each in results["trials"]]
    assert len({*tried}) == len(tried) == before + log.count(" of 3 have ended): accuracy ")
    assert 1 <= before <= len(tried)
    assert {*tried} <= {*SHORT}
    assert {each["host"] for each in results["trials"]} <= {"node0", "node1"}
    (best,) = (each for each in results["trials"] if each["best"])
    assert results["accuracy"] == max(each["scores"]["accuracy"] for each in results["trials"])
    assert results["epochs"] == best["options"]["epochs"]
    assert (folder / "model").is_dir()
    assert f"the best trial: --epochs {results['epochs']}" in shown.stdout
