"""The page as a text: what it says, what it does not claim, and that nothing in a file gets out."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from infra.errors import UsageError
from jobs.report.figures import find_price, reckon_cost
from jobs.report.folder import read_run
from jobs.report.page import render_page
from jobs.report.parts import Report
from jobs.report.sections import build_report
from jobs.report.write import write_report
from tests.jobs.report.sample_runs import make_folder, make_row

_VOID = {"meta", "link"}


class Tags(HTMLParser):
    """Every tag of a page; raises where they are not closed in their order."""

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
    cost = reckon_cost(run, price) if price else None
    return build_report(run, [read_run(other) for other in others], cost)


def charts_of(page: str) -> set[str]:
    return set(re.findall(r'id="chart-(\w+)"', page))


def test_a_whole_run_shows_everything(tmp_path: Path) -> None:
    four = make_folder(tmp_path / "four", ranks=4, slow=2)
    one = make_folder(tmp_path / "one", ranks=1, samples_per_second=64.0)
    page = render_page(report_of(four, one, instance_type="r7iz.metal-16xl"))

    assert charts_of(page) == {"loss", "lr", "samples", "tokens", "time", "ranks", "scaling"}
    assert "No data" not in page
    for told in ("80.5 %", "$2.82", "3.56 ×", "89%", "published: 26 min on 1, 7 min 30 on 4"):
        assert told in page, told
    assert "Here that is rank 2: 11%, where 21% is usual." in page
    assert "0-31 (as planned)" in page
    assert "bf16: every CPU has it in hardware" in page


def test_no_chart_is_drawn_without_data_and_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps({"f1": 50.0}))
    page = render_page(report_of(tmp_path))

    assert charts_of(page) == set()
    assert page.count("No data") == 10
    assert "There is no metrics/rank-N.jsonl" in page


def test_an_interrupted_run_is_told_by_its_metrics_alone(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run", steps=30)
    (folder / "results.json").unlink()
    with (folder / "metrics/rank-1.jsonl").open("a") as file:
        file.write('{"step": 31, "ti')

    report = report_of(folder)

    assert report.warnings[0].startswith("There is no results.json: this run did not finish")
    assert report.warnings[1] == "1 lines of the metrics could not be read; they are left out."
    assert {s.name for s in report.sections if s.chart} == {
        "loss",
        "lr",
        "samples",
        "tokens",
        "ranks",
    }
    assert [tile.label for tile in report.tiles] == ["Tokens", "Padding"]


def test_a_scaling_study_alone_has_its_chart(tmp_path: Path) -> None:
    runs = [{"nodes": n, "samples_per_second": 50.0 * n, "name": "strong"} for n in (1, 2)]
    (tmp_path / "scaling.json").write_text(json.dumps({"runs": runs}))
    report = report_of(tmp_path)
    assert [section.name for section in report.sections if section.chart] == ["scaling"]
    assert report.warnings == []
    assert "<td>2.00 ×</td><td>100%</td><td>strong</td>" in render_page(report)


def test_a_loss_that_is_not_a_number_leaves_a_gap_and_is_told(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run", ranks=1, steps=1)
    rows = [make_row(0, step) for step in range(1, 21)]
    for row in rows[10:]:
        row["loss"] = float("nan")
    (folder / "metrics/rank-0.jsonl").write_text("\n".join(map(json.dumps, rows)))

    report = report_of(folder)

    assert "The loss is not a number at 10 steps." in report.warnings
    assert "nan" not in render_page(report).lower()


def test_a_resumed_run_says_after_which_steps(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run", steps=2, resumed_after=[40, 1200])
    told = report_of(folder).warnings
    assert told == ["This run was interrupted, and went on after step 40, 1,200."]


def test_figures_on_the_training_data_are_not_passed_off_as_others(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run", steps=2, data="a.json", eval_data="a.json")
    assert any("training data itself" in text for text in report_of(folder).warnings)


_EVIL = "<script>alert('1')</script>\"'&\x00\u202e\ud800"


def test_nothing_of_a_file_becomes_part_of_the_page(tmp_path: Path) -> None:
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
    (folder / "job.json").write_text(json.dumps({"cloud": _EVIL, "nodes": [{"type": _EVIL}]}))

    written = write_report(report_of(folder), folder / "report.html", png=False)

    page = written.page.read_text()
    assert "<script" not in page
    assert "<b>" not in page
    assert {tag for tag, _ in Tags(page).seen}.isdisjoint({"script", "b", "iframe", "img"})


def test_the_page_is_well_formed_and_asks_for_nothing(tmp_path: Path) -> None:
    page = render_page(report_of(make_folder(tmp_path / "run", ranks=3)))

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
    assert len(charts) == 6
    for text in charts:
        chart = ET.fromstring(text)
        names = str(chart.get("aria-labelledby")).split()
        assert chart.get("role") == "img"
        assert [each.get("id") for each in chart[:2]] == names
        assert all(each.text for each in chart[:2])


@pytest.mark.parametrize(("ranks", "steps"), [(2, 20_000), (128, 60)])
def test_the_page_stays_small(tmp_path: Path, ranks: int, steps: int) -> None:
    page = render_page(report_of(make_folder(tmp_path / "run", ranks=ranks, steps=steps, slow=5)))
    assert len(page.encode()) < 400_000
    assert ("slowest: rank" in page) is (ranks > 8)


def test_a_place_that_cant_be_written_is_refused(tmp_path: Path) -> None:
    report = report_of(make_folder(tmp_path / "run", steps=2))
    with pytest.raises(UsageError, match="that is a folder"):
        write_report(report, tmp_path, png=False)
    with pytest.raises(UsageError, match=r"results\.json/x\.html: can't be written"):
        write_report(report, tmp_path / "run/results.json/x.html", png=False)


def test_pictures_are_drawn_beside_the_page(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "run", ranks=12, steps=40, model="$x^")
    written = write_report(report_of(folder), tmp_path / "out/page.html", png=True)

    names = [path.name for path in written.pictures]
    parts = ("loss", "lr", "samples", "tokens", "time", "ranks")
    assert names == [f"page-{part}.png" for part in parts]
    for path in written.pictures:
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG")
        assert int.from_bytes(content[16:20], "big") == 1600


def test_pictures_without_matplotlib_are_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.report.png.importlib.util.find_spec", lambda _: None)
    report = report_of(make_folder(tmp_path / "run", steps=2))
    with pytest.raises(UsageError, match="--png needs matplotlib") as caught:
        write_report(report, tmp_path / "report.html", png=True)
    assert "pip install 'spr-cluster[report]'" in str(caught.value.hint)
    assert not (tmp_path / "report.html").exists()
