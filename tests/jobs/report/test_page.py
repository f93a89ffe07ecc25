"""The page as text: contents, missing data, and escaping of hostile files."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from infra.errors import UsageError
from jobs.report.charts import LineChart
from jobs.report.figures import find_price
from jobs.report.page import Report, render_page, write_page
from jobs.report.results_folder import read_run
from jobs.report.sections import build_report
from jobs.worker.tasks import TASKS
from tests.jobs.report.sample_runs import make_folder, make_row

_VOID = {"meta", "link"}


class Tags(HTMLParser):
    """All tags of a page; raises if they are not closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def report_of(folder: Path, *others: Path, instance_type: str | None = None) -> Report:
    run = read_run(folder)
    price = find_price(run, instance_type, None)
    return build_report(run, [read_run(other) for other in others], price)


def note_of(report: Report, name: str) -> str:
    """Return the note of a section's chart."""
    (chart,) = (section.chart for section in report.sections if section.name == name)
    assert chart
    return chart.note


def charts_of(page: str) -> set[str]:
    return set(re.findall(r'id="chart-(\w+)"', page))


def test_a_whole_run_shows_everything(tmp_path: Path) -> None:
    four = make_folder(tmp_path / "four", ranks=4, slow=2, task="squad")
    one = make_folder(tmp_path / "one", ranks=1, samples_per_second=64.0, recipe="reference")
    page = render_page(report_of(four, one, instance_type="r7iz.metal-16xl"))

    assert charts_of(page) == {"loss", "lr", "samples", "tokens", "time", "ranks", "scaling"}
    assert "No data" not in page
    published = "published, DistilBERT, SQuAD v1.1: "
    known = f"{published}26 min on 1, 7 min 30 on 4", f"{published}one epoch on 4 ×"
    for text in ("80.5 %", "$2.82", "$3.27", "3.56 ×", "89%", *known):
        assert text in page, text
    assert "Here, rank 2 waits 11% of the time; the median is 21%." in page
    assert "0-31 (as planned)" in page
    assert "bf16: every CPU has it in hardware" in page

    # It is well-formed, and makes no requests.
    tags = Tags(page).seen
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in tags:
        assert not {"src", "onload", "onclick"} & attributes.keys()
        assert attributes.get("href", "data:,") == "data:,"
    assert "url(" not in page
    assert "@import" not in page
    assert "default-src 'none'" in page
    charts = re.findall(r'<svg class="(?:plot|bars)".*?</svg>(?=\n</div>)', page, re.DOTALL)
    assert len(charts) == 7
    for text in charts:
        chart = ET.fromstring(text)
        names = str(chart.get("aria-labelledby")).split()
        assert chart.get("role") == "img"
        assert [each.get("id") for each in chart[:2]] == names
        assert all(each.text for each in chart[:2])


def test_runs_of_another_task_are_not_compared_with_the_published_ones(tmp_path: Path) -> None:
    lm = make_folder(tmp_path / "lm", steps=2, task="lm")
    other = make_folder(tmp_path / "other", ranks=1, steps=2, task="squad")
    page = render_page(report_of(lm, other, instance_type="r7iz.metal-16xl"))
    assert charts_of(page) >= {"scaling"}
    assert "one epoch of training" in page
    assert "published" not in page


def test_charts_without_data_are_replaced_by_a_note(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps({"f1": 50.0}))
    page = render_page(report_of(tmp_path))

    assert charts_of(page) == set()
    assert page.count("No data") == 10
    assert "No metrics/rank-N.jsonl" in page


def test_an_interrupted_run_is_reported_from_its_metrics(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run", steps=30)
    (folder / "results.json").unlink()
    with (folder / "job/metrics/rank-1.jsonl").open("a") as file:
        file.write('{"step": 31, "ti')

    report = report_of(folder)

    assert report.warnings[0].startswith("No results.json: this run did not finish")
    assert report.warnings[1] == "Skipped 1 unreadable line of the metrics."
    drawn = {"loss", "lr", "samples", "tokens", "ranks"}
    assert {s.name for s in report.sections if s.chart} == drawn
    tokens, padding = report.tiles
    assert (tokens.label, padding.label, padding.value) == ("Tokens", "Padding", "3.3 %")


def trial(number: int, options: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"trial": number, "options": options, **more}


def test_a_study_shows_its_trials_and_what_mattered(tmp_path: Path) -> None:
    rows: list[Any] = [
        trial(1, {"epochs": 2, "seed": 7}, scores={"f1": 80.456, "em": 9}, seconds=61.2),
        trial(2, {"epochs": 3}, scores={"f1": 91.5}, seconds=5.0, best=True),
        trial(3, {"epochs": 4}, failure="no <memory>", state="fail", seconds=1.0),
        trial(4, {"epochs": 5}, state="pruned"),
        "?",
    ]
    importance = {"epochs": 0.8, "seed": 0.2, "x": "y"}
    rows[3]["evaluations"] = [[1, 30.0], [2, 31.0]]
    folder = make_folder(tmp_path / "run", metric="f1", trials=rows, importance=importance)

    report = report_of(folder)
    first = report.sections[0]
    assert "ended early" in note_of(report, "trial-scores")
    rows[3]["state"] = "complete"
    complete = make_folder(tmp_path / "complete", metric="f1", trials=rows)
    assert note_of(report_of(complete), "trial-scores") == ""

    assert "4 trials on 1 node " in f"{report.subtitle} "
    assert first.name == "trials"
    assert first.table
    assert first.table.header == ("trial", "F1", "epochs", "seed", "time")
    assert first.table.rows == [
        ("1", "80.46", "2", "7", "1 min 01 s"),
        ("2 (best)", "91.50", "3", "–", "5.0 s"),
        ("3", "no <memory>", "4", "–", "1.0 s"),
        ("4", "pruned", "5", "–", ""),
    ]
    assert isinstance(first.chart, LineChart)
    assert [tuple(point) for point in first.chart.lines[0].points] == [(1, 80.456), (2, 91.5)]
    assert first.remarks == [
        "Share of the differences that each option explains: epochs 80%, seed 20%."
    ]
    assert "no &lt;memory&gt;" in render_page(report_of(folder))


def test_a_study_shows_its_trials_as_lines_through_their_options(tmp_path: Path) -> None:
    tried = [(1e-5, "<b>", 70.0), (1e-4, "auto", 90.0), (1e-3, "auto", 80.0)]
    rows = [trial(4, {"learning_rate": 5.0}, state="pruned")]
    for number, (rate, dtype, score) in enumerate(tried, 1):
        options = {"learning_rate": rate, "dtype": dtype}
        rows.append(trial(number, options, scores={"f1": score}, best=score == 90.0))
    folder = make_folder(tmp_path / "run", metric="f1", trials=rows)

    found = report_of(folder).sections[2]

    assert found.name == "trial-options"
    assert isinstance(found.chart, LineChart)
    assert found.chart.named_axes == [
        ("learning_rate", "1e-05", "0.001"),
        ("dtype", "<b>", "auto"),
        ("F1", "70", "90"),
    ]
    *others, best = found.chart.lines
    assert best.label == "trial 2, the best"
    assert [round(point.y, 6) for point in best.points] == [0.5, 1, 1]
    assert [[point.y for point in line.points] for line in others] == [[0, 0, 0], [1, 1, 0.5]]
    page = render_page(report_of(folder))
    assert "&lt;b&gt;</text>" in page


def test_a_study_without_scores_has_no_chart_and_other_runs_no_study(tmp_path: Path) -> None:
    failed = make_folder(tmp_path / "failed", metric=3, importance=[], trials=[{"options": "?"}])
    first = report_of(failed).sections[0]
    assert (first.name, first.chart, first.missing) == ("trials", None, "No trial has a score.")
    plain = report_of(make_folder(tmp_path / "plain", trials="?"))
    assert "trials" not in [section.name for section in plain.sections]


def test_a_loss_that_is_not_finite_leaves_a_gap_and_a_warning(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run", ranks=1, steps=1)
    rows = [make_row(0, step) for step in range(1, 21)]
    for row in rows[10:]:
        row["loss"] = float("nan")
    (folder / "job/metrics/rank-0.jsonl").write_text("\n".join(map(json.dumps, rows)))

    report = report_of(folder)

    assert "The loss is not finite at 10 steps." in report.warnings
    assert "nan" not in render_page(report).lower()


def test_what_went_wrong_is_a_warning(tmp_path: Path) -> None:
    known: dict[str, Any] = {"pushed_to": "https://huggingface.co/team/x"}
    known |= {"push_error": "it was not pushed to hub:x", "resumed_after": [40, 1200]}
    report = report_of(make_folder(tmp_path / "run", steps=2, **known))
    interrupted = "This run was interrupted and resumed after step 40, 1,200."
    assert report.warnings == [interrupted, "it was not pushed to hub:x."]
    assert ("on the hub", known["pushed_to"]) in report.facts


@pytest.mark.parametrize("task", sorted(TASKS))
def test_a_tasks_own_scores_are_named_also_where_they_are_of_the_training_data(
    tmp_path: Path, task: str
) -> None:
    names = {"loss": "loss", **TASKS[task].scores}
    known: dict[str, Any] = {"task": task, "scores": dict.fromkeys(names, 50.0)}
    folder = make_folder(tmp_path / "run", steps=2, data="a.json", eval_data="a.json", **known)
    report = report_of(folder)

    assert [tile.label for tile in report.tiles[: len(names)]] == [*names.values()]
    text = ", ".join(names.values())
    assert f"{text}: measured on the training data, not on unseen data." in report.warnings


_EVIL = "<script>alert('1')</script>\"'&\x00\u202e\ud800"


def test_contents_of_files_are_escaped(tmp_path: Path) -> None:
    def spoil(value: Any) -> Any:
        if isinstance(value, dict):
            return {f"{key}": spoil(each) for key, each in value.items()}
        if isinstance(value, list):
            return [spoil(each) for each in value]
        return _EVIL if isinstance(value, str) else value

    folder = make_folder(tmp_path / "<b>run", steps=20)
    results = json.loads((folder / "results.json").read_text())
    spoilt = {**spoil(results), "versions": {_EVIL: _EVIL}}
    spoilt["seconds"] = {**results["seconds"], _EVIL: 5.0}
    (folder / "results.json").write_text(json.dumps(spoilt))
    (folder / "job/job.json").write_text(json.dumps({"cloud": _EVIL, "nodes": [{"type": _EVIL}]}))

    write_page(report_of(folder), folder / "report.html")

    page = (folder / "report.html").read_text()
    assert "<script" not in page
    assert "<b>" not in page
    assert {tag for tag, _ in Tags(page).seen}.isdisjoint({"script", "b", "iframe", "img"})
    for place, why in {
        tmp_path: "is a folder",
        folder / "results.json/x": "can't be written",
    }.items():
        with pytest.raises(UsageError, match=why):
            write_page(report_of(folder), place)


@pytest.mark.parametrize(("ranks", "steps"), [(2, 8_000), (128, 60)])
def test_the_page_stays_small(tmp_path: Path, ranks: int, steps: int) -> None:
    page = render_page(report_of(make_folder(tmp_path / "run", ranks=ranks, steps=steps, slow=5)))
    assert len(page.encode()) < 400_000
    assert ("slowest: rank" in page) is (ranks > 8)


def test_a_classifier_has_its_scores_and_a_confusion_matrix(tmp_path: Path) -> None:
    classes, matrix = ["a", "<b>"], [[3, 1], [0, 4]]
    own: dict[str, Any] = {"scores": {"accuracy": 87.5}, "classes": classes, "confusion": matrix}
    page = render_page(report_of(make_folder(tmp_path / "run", steps=3, **own)))
    Tags(page)
    assert "<td>&lt;b&gt;</td><td>0</td><td>4</td>" in page
    assert "87.5 %" in page
    for damaged in ([], [[1]], [1, 2], [[1, 2]], "x"):
        folder = make_folder(tmp_path / str(damaged), steps=3, **{**own, "confusion": damaged})
        assert report_of(folder).confusion is None
