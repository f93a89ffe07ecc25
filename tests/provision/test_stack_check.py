"""`stacks --check` against indexes of the tests' own, with the real uv."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from uv import find_uv_bin

from infra.wait import Silent
from provision.stacks.load import load_stack
from provision.stacks.sources import (
    PipConfiguration,
    Resolver,
    SourcesReport,
    check_sources,
    find_resolver,
    without_login,
)
from provision.stacks.stack import Stack
from tests.provision.package_index import PackageIndex, serve_index, serve_only_index

PACKAGES = ("torch==2.7.0", "oneccl-bind-pt==2.7.0")


@pytest.fixture
def resolver(pypi: PackageIndex) -> Resolver:
    # As find_resolver, which asks pip for the same; that takes a while.
    return Resolver(find_uv_bin(), PipConfiguration(pypi.url), answer_s=5)


@pytest.fixture
def pypi(monkeypatch: pytest.MonkeyPatch) -> Iterator[PackageIndex]:
    with serve_only_index(monkeypatch) as index:
        index.add("torch", "2.6.0")
        index.add("torch", "2.7.0")
        yield index


@pytest.fixture
def intel() -> Iterator[PackageIndex]:
    """The second index; the bindings are for the nodes' Python and Linux alone."""
    with serve_index() as index:
        for version in ("2.5.0", "2.6.0", "2.7.0"):
            index.add("oneccl-bind-pt", f"{version}+cpu", "cp310-cp310-linux_x86_64")
        yield index


def check(
    resolver: Resolver, intel: PackageIndex, /, limit_s: float = 60, **changes: Any
) -> SourcesReport:
    base = {"indexes": [intel.url], "python_packages": PACKAGES, "examples": "", **changes}
    stack = Stack.model_validate({**load_stack("intel").model_dump(), **base})
    return check_sources(stack, resolver, Silent(), limit_s=limit_s)


def sentences(report: SourcesReport) -> list[str]:
    return [problem.sentence for problem in report.problems]


def test_a_missing_version_is_named_with_the_newest(
    resolver: Resolver, pypi: PackageIndex, intel: PackageIndex
) -> None:
    del intel.pages["/oneccl-bind-pt/"]["oneccl_bind_pt-2.7.0+cpu-cp310-cp310-linux_x86_64.whl"]

    report = check(resolver, intel)

    assert sentences(report) == [
        "oneccl-bind-pt==2.7.0 is not available for Python 3.10 on Ubuntu 22.04: "
        f"on {pypi.url}, {intel.url} the newest version is 2.6.0+cpu"
    ]
    assert report.problems[0].package == "oneccl-bind-pt"
    assert report.packages == ()


def test_an_index_that_stops_answering_is_named(resolver: Resolver, intel: PackageIndex) -> None:
    intel.silent |= {"/torch/", "/oneccl-bind-pt/"}

    report = check(replace(resolver, answer_s=1), intel)

    (problem,) = report.problems
    for words in ("Failed to fetch", f"{intel.url}/", "timed out"):
        assert words in problem.sentence
    assert (problem.index, report.packages) == (intel.url, ())
    # The time of a whole check is limited as well.
    report = check(replace(resolver, answer_s=20), intel, limit_s=1)
    assert sentences(report) == ["uv did not finish within 1 s"]


def test_an_index_that_answered_a_moment_ago_is_asked_again(
    resolver: Resolver, intel: PackageIndex, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("UV_NO_CACHE")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path))
    assert sentences(check(resolver, intel)) == []
    intel.statuses["/oneccl-bind-pt/"] = 503

    assert "503 Service Unavailable" in sentences(check(resolver, intel))[0]


def test_pages_of_links_pip_and_examples_are_checked_too(
    resolver: Resolver, pypi: PackageIndex, intel: PackageIndex
) -> None:
    page, archive = f"{intel.url}/links", f"{intel.url}/v4.tar.gz"
    more: dict[str, Any] = {"find_links": [page], "pip": "25.0.1", "examples": archive}
    report = check(resolver, intel, indexes=[], **more)

    assert sentences(report) == [
        f"pip==25.0.1 is not available for Python 3.10 on Ubuntu 22.04: on {pypi.url}, {page} "
        "there is no version of it",
        f"{archive} can't be read: HTTP Error 404: Not Found",
    ]


@pytest.mark.parametrize(
    ("status", "option", "reason"),
    [(403, "indexes", ""), (503, "indexes", "503"), (403, "find_links", "403")],
)
def test_an_index_may_refuse_what_another_one_has(
    resolver: Resolver, intel: PackageIndex, status: int, option: str, reason: str
) -> None:
    intel.statuses |= {"/torch/": status, "/links": status}
    url = intel.url if option == "indexes" else f"{intel.url}/links"
    change: dict[str, Any] = {"python_packages": ["torch==2.7.0"], "indexes": [], option: [url]}

    report = check(resolver, intel, **change)

    assert [reason in each.sentence for each in report.problems] == [True] * bool(reason)
    assert bool(report.packages) is not bool(reason)


def test_a_missing_folder_of_packages_is_named(resolver: Resolver, intel: PackageIndex) -> None:
    gone = "file:///gone/simple"
    report = check(resolver, intel, indexes=[intel.url, gone])
    assert [(each.sentence, each.index) for each in report.problems] == [
        (f"{gone} does not exist", gone)
    ]


def test_sources_are_reached_as_pip_reaches_them(
    pypi: PackageIndex, intel: PackageIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through a proxy that only pip's configuration names, and without showing the password."""
    monkeypatch.setenv("PIP_PROXY", pypi.url)
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:p@ssword@index.test")

    only: dict[str, Any] = {"indexes": ["http://index.test"], "python_packages": PACKAGES[:1]}
    report = check(find_resolver(), intel, **only)

    assert sentences(report) == []
    assert "http://index.test/torch/" in pypi.asked
    assert report.sources[0] == "http://index.test"
    assert without_login("https://user:p#s?s@word@index.test/simple") == "https://index.test/simple"
