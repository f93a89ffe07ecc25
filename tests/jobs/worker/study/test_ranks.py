"""Two real ranks of a study, with trials in processes of their own; tests/e2e/test_study.py stops one."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from jobs.worker.runtime.events import parse_event
from jobs.worker.study.plan import Domain, StudyPlan
from jobs.worker.tasks.digits import DigitsOptions
from tests.jobs.worker.started_ranks import started_ranks

PLAN = StudyPlan({"batch_size": Domain((16, 9999, 20))}, 3)
MARK = "5f3a"


def test_a_study_has_the_best_of_its_trials_and_the_reason_of_a_failed_one(tmp_path: Path) -> None:
    options = DigitsOptions(digits=64, epochs=2, report_to="none").to_json()
    argv = ["worker.study", "digits", json.dumps(asdict(PLAN)), options]
    with started_ranks([tmp_path] * 2, argv, [{"SPR_MARK": MARK}] * 2) as running:
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
