"""Two runs side by side, and the interval of their scores' difference."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest

from jobs.report import comparison
from jobs.report.comparison import Comparison, bootstrap, compare
from jobs.report.results_folder import read_run
from tests.jobs.report.sample_runs import make_folder


def make_run(folder: Path, predictions: Any = None, **changes: Any) -> Path:
    make_folder(folder, ranks=2, steps=2, **changes)
    options = {"epochs": changes.get("epochs", 2), "seed": 42, "output": folder.name}
    job = {"argv": ["python", "-m", "worker.tasks", "classify", json.dumps(options)]}
    (folder / "job" / "job.json").write_text(json.dumps(job))
    if predictions is not None:
        (folder / "predictions.json").write_text(json.dumps(predictions))
    return folder


def test_files_have_the_names_that_the_user_gave(tmp_path: Path) -> None:
    for name in ("one", "two"):
        path = make_run(tmp_path / name) / "job" / "job.json"
        options = {"data": "data/train.csv", "eval": "data/eval.csv", "model": "model"}
        names = {"data/train.csv": "a.csv", "data/eval.csv": f"{name}/dev.csv"}
        env = {"SPR_NAMES": json.dumps(names), "SPR_BASE_MODEL": f"/models/{name}"}
        argv = ["python", json.dumps({"tune": {}}), json.dumps(options)]  # of a study
        path.write_text(json.dumps({"argv": argv, "env": env}))
    assert compared(tmp_path / "one", tmp_path / "two").differing == {
        "--eval": ("one/dev.csv", "two/dev.csv"),
        "--model": ("/models/one", "/models/two"),
    }


def compared(one: Path, two: Path) -> Comparison:
    return compare(read_run(one), read_run(two))


def rows(right: list[bool]) -> list[dict[str, Any]]:
    return [{"labels": ["a"], "predicted": ["a" if each else "b"]} for each in right]


def test_only_what_differs_is_listed_and_all_scores(tmp_path: Path) -> None:
    versions = {"torch": "2.12.0", "python": "3.11.2"}
    one = make_run(tmp_path / "one", epochs=2, scores={"f1": 80.0})
    two = make_run(tmp_path / "two", epochs=3, scores={"f1": 81.5}, versions=versions, amx=False)
    found = compared(one, two)
    assert found.runs == ("one", "two")
    assert found.differing["--epochs"] == (2, 3)
    assert found.differing["version of torch"][1] == "2.12.0"
    assert found.differing["amx"] == (True, False)
    assert not {"--seed", "--output", "seed", "model", "world size"} & {*found.differing}
    assert found.scores == {"F1": (80.0, 81.5)}
    assert [line.split() for line in found.as_text().splitlines()][:2] == [
        ["one", "two"],
        ["--epochs", "2", "3"],
    ]


def test_names_with_newlines_stay_in_their_row(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, scores={}, versions={"a\nb": name}) for name in ("1\n2", "3")]
    assert "version of a b  1 2  3" in compared(*runs).as_text().splitlines()


def test_accuracy_has_a_paired_interval(tmp_path: Path) -> None:
    draw = random.Random(3)
    first = [draw.random() < 0.7 for _ in range(200)]
    second = [each or draw.random() < 0.2 for each in first]  # never worse
    one = make_run(tmp_path / "one", rows(first), task="classify")
    two = make_run(tmp_path / "two", rows(second), task="classify")
    found = compared(one, two)
    (only,) = found.differences
    differences = [100.0 * (b - a) for a, b in zip(first, second, strict=True)]
    mean, error = sum(differences) / 200, stdev(differences) / 200**0.5
    assert (only.score, only.samples) == ("accuracy", 200)
    assert only.difference == pytest.approx(mean)
    # The normal approximation; of unpaired samples, it would be three times as wide.
    assert only.low == pytest.approx(mean - 1.96 * error, abs=0.3 * error)
    assert only.high == pytest.approx(mean + 1.96 * error, abs=0.3 * error)
    assert compared(one, two) == found
    assert f"accuracy: {mean:+.2f}, 95 % interval {only.low:+.2f}" in found.as_text()
    assert json.loads(json.dumps(asdict(found)))["differences"][0]["low"] == only.low
    labels: dict[str, Any] = {"task": "classify", "scores": {"exact_match": 70.0}}
    one, two = (make_run(tmp_path / n, rows(first), **labels) for n in ("three", "four"))
    assert compared(one, two).differences[0].score == "all labels right"


def test_many_samples_are_resampled_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "MOST_GROUPS", 200)
    draw = random.Random(5)
    samples = [(draw.gauss(1.0, 0.3), draw.gauss(1.0, 0.3), 1.0) for _ in range(2_000)]
    found = bootstrap("loss", samples, float)
    error = stdev([b - a for a, b, _ in samples]) / len(samples) ** 0.5
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.1)


def test_answers_are_judged_by_the_evaluation_data(tmp_path: Path) -> None:
    context = "Ada wrote the first program in 1843."
    asked = {"question": "Who?", "answers": [{"text": "Ada", "answer_start": 0}]}
    qas = [{"id": f"q{n}", **asked} for n in range(4)]
    data = tmp_path / "dev.json"
    paragraphs = [{"context": context, "qas": qas}]
    data.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    said = [dict.fromkeys(("q0", "q1", "q2", "q3"), text) for text in ("in 1843", "Ada wrote")]
    more = {"task": "squad", "eval_data": str(data)}
    one = make_run(tmp_path / "one", said[0], **more)
    two = make_run(tmp_path / "two", said[1], **more)
    f1, em = compared(one, two).differences
    assert f1.score == "F1"
    assert f1.difference == pytest.approx(200 / 3)
    assert f1.low == f1.high
    assert (em.difference, em.samples) == (0.0, 4)
    data.unlink()
    found = compared(one, two)
    assert not found.differences
    assert "the evaluation data can't be read here" in found.as_text()


def test_perplexity_weighs_samples_by_their_tokens(tmp_path: Path) -> None:
    def lines(short: float, long: float) -> list[dict[str, float]]:
        return [{"loss": short, "tokens": 2}] * 45 + [{"loss": long, "tokens": 500}] * 5

    one = make_run(tmp_path / "one", lines(2.0, 3.0), task="lm")
    two = make_run(tmp_path / "two", lines(4.0, 2.0), task="lm")
    (only,) = compared(one, two).differences
    mean = [(90 * short + 2500 * long) / 2590 for short, long in ((2.0, 3.0), (4.0, 2.0))]
    assert only.difference == pytest.approx(math.exp(mean[1]) - math.exp(mean[0]))
    assert only.difference < 0
    # A draw with more tokens has no larger loss: if each sample's is the same, there is no doubt.
    one = make_run(tmp_path / "three", lines(2.0, 2.0), task="lm")
    two = make_run(tmp_path / "four", lines(1.5, 1.5), task="lm")
    (only,) = compared(one, two).differences
    assert (only.difference, only.low, only.high) == pytest.approx(
        [math.exp(1.5) - math.exp(2.0)] * 3
    )


SAME: Any = [{"loss": 1.0, "tokens": 2}]


@pytest.mark.parametrize(
    ("task", "one", "two", "reason"),
    [
        ("classify", rows([True]), [{"labels": ["b"], "predicted": ["b"]}], "on different data"),
        ("classify", rows([True]), None, "predictions.json is missing or unreadable"),
        ("classify", 7, 8, "has another form"),
        ("lm", SAME, [{"loss": 1.0, "tokens": 3}], "on different data"),
        ("lm", [{"loss": math.nan, "tokens": 2}], [{"loss": 1, "tokens": 2}], "a run has diverged"),
        ("lm", [{"lost": 1.0}], [{"loss": 1.0}], "has another form"),
        ("squad", {"a": "x"}, {"b": "x"}, "on different data"),
        ("lm", (SAME, {"eval_digest": "other"}), SAME, "on different data"),
        ("lm", (SAME, {"eval_digest": None}), SAME, "does not say what it was evaluated on"),
        ("tag", [], [], "only two runs of classify, squad, lm have one"),
    ],
)
def test_without_an_interval_it_says_why(
    tmp_path: Path, task: str, one: Any, two: Any, reason: str
) -> None:
    one, more = one if isinstance(one, tuple) else (one, {})
    first = make_run(tmp_path / "one", one, task=task, **more)
    found = compared(first, make_run(tmp_path / "two", two, task=task))
    assert not found.differences
    assert reason in found.reason
    assert f"no interval: {found.reason}" in found.as_text()
