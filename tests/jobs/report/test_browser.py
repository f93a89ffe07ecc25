"""The report in a real browser: rendering, requests, contrast, light and dark, phone, and print."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.report.figures import find_price
from jobs.report.page import write_page
from jobs.report.results_folder import read_run
from jobs.report.sections import build_report
from tests.harness.browser import Page, open_page
from tests.jobs.report.sample_runs import make_folder

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
_CHARTS = ["loss", "lr", "samples", "tokens", "time", "ranks", "scaling"]
_SIZES = """Object.fromEntries([...document.querySelectorAll('svg[role=img]')].map(svg => {
  const drawn = [...svg.querySelectorAll('.data path, rect, circle')].map(e => e.getBoundingClientRect());
  const box = svg.getBoundingClientRect();
  return [svg.id.replace('chart-', ''), {
    width: box.width, height: box.height, count: drawn.length,
    drawn: drawn.filter(d => d.width > 1 || d.height > 1).length,
    outside: drawn.filter(d => d.left < box.left - 8 || d.right > box.right + 8
      || d.top < box.top - 8 || d.bottom > box.bottom + 8).length,
  }];
}))"""
# Lowest contrast of text, by WCAG's formula.
_CONTRAST = """(() => {
  const light = c => c.match(/\\d+(\\.\\d+)?/g).slice(0, 3).map(Number).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  const card = light(getComputedStyle(document.querySelector('.card')).backgroundColor);
  const text = [...document.querySelectorAll('.card h2, .card p, .card td, .card li, .card dt, summary')]
    .map(e => ratio(light(getComputedStyle(e).color), card));
  const labels = [...document.querySelectorAll('svg text')]
    .map(e => ratio(light(getComputedStyle(e).fill), card));
  return {card, least: Math.min(...text, ...labels)};
})()"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete page of four nodes, one of them slow, written like the command does."""
    root = tmp_path_factory.mktemp("report")
    four = read_run(make_folder(root / "four", ranks=4, steps=2000, slow=2))
    others = [
        read_run(make_folder(root / f"n{n}", ranks=n, steps=5, samples_per_second=58.0 * n))
        for n in (1, 2)
    ]
    price = find_price(four, "r7iz.metal-16xl", None)
    report = build_report(four, others, price)
    path = root / "report.html"
    write_page(report, path)
    return path


@pytest.fixture(scope="module")
def browser(page: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with open_page(page, tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.mark.parametrize("width", [1200, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_chart_fits_into_its_frame(
    browser: Page, page: Path, tmp_path: Path, scheme: str, width: int
) -> None:
    browser.look(scheme, width)

    found = browser.evaluate(_SIZES)

    assert list(found) == _CHARTS
    for name, size in found.items():
        assert size["width"] > 200, name
        assert size["height"] > 40, name
        assert size["drawn"] > 0, name
        assert size["outside"] == 0, name
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    picture = browser.screenshot(tmp_path / "page.png")
    assert picture.startswith(b"\x89PNG")
    # An empty page would have a tenth of that.
    assert len(picture) > 50_000
    assert browser.complaints == []
    assert browser.requests == [page.as_uri()]
    assert browser.evaluate("document.scripts.length") == 0


@pytest.mark.parametrize(("scheme", "is_dark"), [("light", False), ("dark", True)])
def test_light_and_dark_schemes_have_enough_contrast(
    browser: Page, scheme: str, is_dark: bool
) -> None:
    browser.look(scheme, 1200)
    found = browser.evaluate(_CONTRAST)
    assert (found["card"] < 0.1) is is_dark
    assert found["least"] >= 4.5


def test_the_page_prints_on_a_few_sheets(browser: Page, tmp_path: Path) -> None:
    browser.look("dark", 1200)
    paper = browser.print(tmp_path / "page.pdf")
    assert paper.startswith(b"%PDF")
    assert 2 <= paper.count(b"/Type /Page\n") <= 6
