"""Two real ranks of a study: trials in processes of their own, a stop, and what a resume does not repeat."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path

from jobs.worker.runtime.events import parse_event
from jobs.worker.study.plan import Domain, StudyPlan
from jobs.worker.tasks.digits import DigitsOptions
from tests.jobs.worker.started_ranks import started_ranks

PLAN = StudyPlan({"batch_size": Domain((16, 9999, 20))}, 3)
MARK = "5f3a"


def ranks(folder: Path, *more: str) -> AbstractContextManager[list[subprocess.Popen[str]]]:
    """Two ranks in a job's folder."""
    options = DigitsOptions(digits=64, epochs=2, report_to="none").to_json()
    argv = ["worker.study", "digits", json.dumps(asdict(PLAN)), options, *more]
    return started_ranks([folder, folder], argv, [{"SPR_MARK": MARK}] * 2)


def test_a_stopped_study_goes_on_where_it_was(tmp_path: Path) -> None:
    checkpoint = tmp_path / "output.state" / "checkpoints" / "step-000001"
    with ranks(tmp_path) as running:
        until = time.monotonic() + 120
        while not checkpoint.exists() and running[0].poll() is None:
            assert time.monotonic() < until
            time.sleep(0.05)
        for process in running:
            process.send_signal(signal.SIGTERM)
        said = [process.communicate(timeout=60)[0] for process in running]
        # The other one may still have been starting, without a trial to end.
        codes = [process.returncode for process in running]
        assert codes in ([143, 143], [143, -signal.SIGTERM]), said
    ended = len([line for line in said[0].splitlines() if " of 3 have ended): " in line])
    assert f'"stopped", "step": {ended}, "total": 3' in said[0]

    with ranks(tmp_path, "--resume") as running:
        said = [process.communicate(timeout=240)[0] for process in running]
        assert [process.returncode for process in running] == [0, 0], said

    events = [event for line in said[0].splitlines() if (event := parse_event(line, MARK))]
    (start,) = (event for event in events if event["event"] == "start")
    assert start["world_size"] == 2
    assert events[-1]["event"] == "result"
    results = json.loads((tmp_path / "output" / "results.json").read_text())
    trials = results["trials"]
    assert len(trials) == len({json.dumps(each["options"]) for each in trials}) == 3
    # A batch of 9999 is refused, and is no reason to end the study.
    (failed,) = (each for each in trials if each["options"]["batch_size"] == 9999)
    assert "--batch-size 9999 is out of range" in failed["failure"]
    (best,) = (each for each in trials if each["best"])
    assert best["scores"]["accuracy"] == results["accuracy"]
    assert results["batch_size_per_rank"] == best["options"]["batch_size"]
    assert (tmp_path / "output" / "model").exists()
    state = tmp_path / "output.state"
    steps = (state / "metrics" / "rank-0.jsonl").read_text().splitlines()
    assert json.loads(steps[-1])["lr"] > 0
    log = (state / "logs" / f"trial-{best['trial']}.log").read_text().splitlines()
    assert "result" in [(parse_event(line, MARK) or {}).get("event") for line in log]
    assert not list((tmp_path / "trials").glob("*/*"))
    assert "trials have ended before" in said[0]
