"""Rank 0's side of a study: proposals, early ends, the best model, and what a checkpoint brings back."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from jobs.worker.runtime.events import Events
from jobs.worker.study.coordinator import BEST, JOURNAL, Coordinator, restore
from jobs.worker.study.plan import STUDY, Domain, StudyPlan
from jobs.worker.study.trials import TrialRunner
from jobs.worker.tasks.digits import DigitsOptions
from jobs.worker.tasks.lm.model import LmOptions
from jobs.worker.tasks.squad.task import SquadOptions
from jobs.worker.training.options import TrainOptions

RATES = {"learning_rate": Domain(low=1e-4, high=1e-1, log=True)}
SIZES = {"batch_size": Domain((8, 16)), "seed": Domain((1, 2, 3))}


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "output.state"


def make(
    state: Path,
    tune: Mapping[str, Domain] = RATES,
    trials: int = 4,
    options: TrainOptions | None = None,
    ranks: int = 1,
) -> Coordinator:
    plan = StudyPlan(tune, trials)
    return Coordinator(plan, options or DigitsOptions(), state, Events(), ranks)


def end(study: Coordinator, number: int, **outcome: Any) -> None:
    """Tell a trial's end, as its rank does: the output of a better one is there before."""
    scores = outcome.get("scores")
    if scores and study.is_better(scores):
        new = study.folder / f"new-{number}"
        (new / ".metrics").mkdir(parents=True)
        (new / ".metrics/rank-0.jsonl").write_text(f"of {number}")
        seconds = {"train": 1.0, "total": 1.0}
        (new / "results.json").write_text(json.dumps({"by": number, "seconds": seconds}))
    study.tell(number, {"host": "a", "seconds": 2.0, **outcome})


def run(study: Coordinator, *accuracies: float) -> list[dict[str, Any]]:
    """Run trials one by one with these scores; return the options of each."""
    tried = []
    for accuracy in accuracies:
        trial = study.ask()
        tried.append(trial["options"])
        end(study, trial["number"], scores={"accuracy": accuracy})
    return tried


def best_of(study: Coordinator) -> Any:
    return json.loads((study.folder / BEST / "results.json").read_text())["by"]


def test_values_are_drawn_from_a_range_by_the_seed(tmp_path: Path) -> None:
    layers = {"batch_size": Domain(low=4, high=64), **RATES}
    tried, again, other = (
        run(make(tmp_path / str(number), layers, 8, DigitsOptions(seed=seed)), *range(8))
        for number, seed in enumerate((42, 42, 7))
    )
    assert tried == again != other
    assert all(isinstance(each["batch_size"], int) for each in tried)
    assert all(4 <= each["batch_size"] <= 64 for each in tried)
    assert all(1e-4 <= each["learning_rate"] <= 1e-1 for each in tried)
    assert len({each["learning_rate"] for each in tried}) == 8


@pytest.mark.parametrize(
    ("options", "metric", "scores"),
    [
        (DigitsOptions(), "accuracy", [{"accuracy": each} for each in (50.0, 70.0, 70.0, 60.0)]),
        (LmOptions(), "perplexity", [{"perplexity": each} for each in (9.0, 4.0, 5.0)]),
        (SquadOptions(metric="em"), "em", [{"f1": 90.0, "em": 10.0}, {"f1": 80.0, "em": 20.0}]),
    ],
    ids=["the first of equal ones", "the lowest perplexity", "by the user's metric"],
)
def test_the_best_output_is_kept(
    state: Path, options: TrainOptions, metric: str, scores: list[dict[str, float]]
) -> None:
    study = make(state, options=options)
    for each in scores:
        end(study, study.ask()["number"], scores=each)
    assert best_of(study) == 1
    assert study.results()["metric"] == metric
    assert not list(study.folder.glob("new-*"))


def test_of_equal_trials_the_first_to_end_is_the_best(state: Path) -> None:
    study = make(state, {**RATES, "batch_size": Domain((8, 16))})
    numbers = [study.ask()["number"] for _ in range(2)]
    for number in reversed(numbers):
        end(study, number, scores={"accuracy": 50.0})
    assert study.best().number == best_of(study) == 1
    assert study.results()["importance"] == {}, "equal scores say nothing of the options"


def test_a_trial_ends_early_unless_it_is_in_the_best_third_so_far(state: Path) -> None:
    study = make(state, trials=9)
    numbers = [study.ask()["number"] for _ in range(9)]
    accuracies = [50.0, 60.0, 40.0, 55.0, 70.0, 65.0, 66.0]
    pruned = [
        study.report(number, 1, {"accuracy": accuracy})
        for number, accuracy in zip(numbers, accuracies, strict=False)
    ]
    # The second best of six is in the best third, that of five is not.
    assert pruned == [False, False, True, True, False, False, False]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("epochs", DigitsOptions()),
        ("max_steps", DigitsOptions()),
        ("batch_size", DigitsOptions(eval_every="5")),
    ],
)
def test_no_trial_ends_early_where_evaluations_mean_different_things(
    state: Path, name: str, options: TrainOptions
) -> None:
    study = make(state, {name: Domain(tuple(range(1, 10)))}, 9, options)
    for accuracy in range(9, 0, -1):
        assert not study.report(study.ask()["number"], 1, {"accuracy": float(accuracy)})


def test_no_trial_is_made_twice(state: Path) -> None:
    layers = {"batch_size": Domain(low=1, high=3)}
    tried = []
    study = make(state, layers, 20)
    while trial := study.ask():
        tried.append(trial["options"]["batch_size"])
        end(study, trial["number"], scores={"accuracy": 1.0})
    assert sorted(tried) == [1, 2, 3]
    assert len(study.results()["trials"]) == 3


def test_a_pruned_or_failed_trial_is_no_result_and_does_not_end_the_study(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = make(state, trials=3)
    end(study, study.ask()["number"])
    end(study, study.ask()["number"], failure="no memory")
    assert study.best() is None
    run(study, 5.0)
    assert study.ask() == {}
    trials = study.results()["trials"]
    assert [each["state"] for each in trials] == ["pruned", "fail", "complete"]
    assert [each.get("failure") for each in trials] == [None, "no memory", None]
    said = "trial 2 (2 of 3 have ended): failed: no memory (--learning-rate 0."
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(("ranks", "failures"), [(1, 3), (5, 5)])
def test_three_failures_before_any_success_end_it_or_one_of_each_rank(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: int, failures: int
) -> None:
    study = make(state, trials=50, ranks=ranks)
    numbers = [study.ask()["number"] for _ in range(failures)]
    for number in numbers[1:]:
        end(study, number, failure="no such model")
    assert study.ask()
    end(study, numbers[0], failure="no such model")
    assert study.ask() == {}, "though one still runs"
    assert study.finish(tmp_path / "output") == 1
    assert "no trial succeeded: no such model" in capsys.readouterr().out


def limit_job(folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Work in a job's folder; the job has a time limit."""
    monkeypatch.chdir(folder)
    launch = {"spec": {"ending": {"max_time_s": seconds}}}
    (folder / "launch.json").write_text(json.dumps(launch))


def test_no_trial_begins_that_would_end_after_the_limit(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limit_job(tmp_path, monkeypatch, 120.0)
    study = Coordinator(StudyPlan(RATES, 9), DigitsOptions(), state, Events())
    # A quarter of the limit is for the end.
    _, _, left = study.join(0, "a")
    assert left == pytest.approx(90, abs=5)
    end(study, study.ask()["number"], scores={"accuracy": 1.0}, seconds=50.0)
    study.report(study.ask()["number"], 1, {"accuracy": 0.0})
    end(study, 1, seconds=100.0)  # one that was pruned does not count
    end(study, study.ask()["number"], scores={"accuracy": 1.0}, seconds=95.0)
    assert study.ask() == study.ask() == {}
    said = capsys.readouterr().out
    assert said.count("no time for another trial in the job's limit, 2 min") == 1


def test_a_restart_has_the_rest_of_the_time(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_job(tmp_path, monkeypatch, 3600.0)
    # Not begin.json, which only the head has.
    (tmp_path / "first.json").write_text(json.dumps({"first": time.time() - 3000}))
    study = Coordinator(StudyPlan(RATES, 9), DigitsOptions(), state, Events())
    assert study.join(0, "a")[2] == pytest.approx(540, abs=5)


def test_a_checkpoint_brings_back_what_has_ended(state: Path) -> None:
    (state / "checkpoints" / "step-000001.partial").mkdir(parents=True)
    assert not restore(state)
    study = make(state, SIZES, 6)
    first = run(study, 10.0, 30.0)
    interrupted = study.ask()
    run(study, 20.0)
    study.save()
    assert first != study.plan.combinations()[:2], "neighbors would be alike"

    assert restore(state)
    again = make(state, SIZES, 6)

    assert len(again.ended()) == 3
    assert best_of(again) == 1
    rest = run(again, 1.0, 2.0, 3.0)
    assert again.ask() == {}
    assert interrupted["options"] in rest
    every = [each["options"] for each in again.results()["trials"]]
    assert len(every) == 6
    assert len({json.dumps(each) for each in every}) == 6


def test_two_checkpoints_are_kept_each_with_the_best_output(state: Path) -> None:
    study = make(state)
    for accuracy in (10.0, 20.0, 15.0):
        run(study, accuracy)
        study.save()
        study.save()
    folder = state / "checkpoints"
    assert sorted(each.name for each in folder.iterdir()) == ["step-000002", "step-000003"]
    for each in folder.iterdir():
        assert (each / "state.pt").stat().st_size
        assert json.loads((each / BEST / "results.json").read_text())["by"] == 1
        assert json.loads((each / "checkpoint.json").read_text()) == {"trials": int(each.name[-1])}


def test_the_results_are_those_of_the_best_trial_with_all_trials(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study, output = make(state, {**RATES, "batch_size": Domain((8, 16))}), tmp_path / "output"
    run(study, 10.0, 40.0, 20.0, 30.0)
    assert study.finish(output) == 0

    results = json.loads((output / "results.json").read_text())
    assert results["by"] == 1
    assert results["metric"] == "accuracy"
    assert [each["best"] for each in results["trials"]] == [False, True, False, False]
    assert {*results["trials"][0]["options"]} == {"learning_rate", "batch_size"}
    assert sum(results["importance"].values()) == pytest.approx(1, abs=0.01)
    assert (state / "metrics/rank-0.jsonl").read_text() == "of 1"
    assert not (output / ".metrics").exists()
    assert (output / "study.journal").read_bytes() == (state / STUDY / JOURNAL).read_bytes()
    assert "trial 2 (2 of 4 have ended): accuracy 40.00, the best so far" in capsys.readouterr().out


def test_a_warning_of_several_trials_is_noted_once(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = make(state)

    def call(method: str, *arguments: Any) -> Any:
        assert method in study.SERVED
        return getattr(study, method)(*arguments)

    remote: Any = SimpleNamespace(call=call)
    runner = TrialRunner(0, {}, remote, mock.Mock(requested=False), state, "5f3a")
    texts = ("warning: slow", "fast: nothing", "warning: slow")
    lines = (json.dumps({"event": "note", "text": text}) for text in texts)
    stream = io.StringIO("".join(f"@spr 5f3a {line}\n" for line in lines))
    assert runner._follow(1, mock.Mock(), stream, io.StringIO()) == ("", False)
    said = capsys.readouterr().out
    assert (said.count("warning: slow"), said.count("nothing")) == (1, 0)


def test_a_best_trial_that_can_not_be_sent_is_a_lost_peer(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.worker.pool.rank.run_ssh", lambda *_, **__: mock.Mock(returncode=255))
    runner = TrialRunner(1, {}, mock.Mock(), mock.Mock(), state, _to="node0")
    with pytest.raises(OSError, match="-trial-8 can't be copied to node0"):  # the job runs again
        runner._send(7)
