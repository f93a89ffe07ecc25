"""`stacks --check` against indexes of the tests' own, with the real uv."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from infra.wait import Silent
from provision.stacks.load import load_stack
from provision.stacks.sources import (
    Problem,
    Resolver,
    SourcesReport,
    check_sources,
    find_resolver,
    probe_all,
)
from provision.stacks.stack import Stack
from tests.provision.package_index import PackageIndex, serve_index, serve_only_index

PACKAGES = ("torch==2.7.0", "oneccl-bind-pt==2.7.0")


@pytest.fixture
def resolver(pypi: PackageIndex) -> Resolver:
    return find_resolver(answer_s=5)


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


def test_an_available_stack_is_resolved_and_not_installed(
    resolver: Resolver, pypi: PackageIndex, intel: PackageIndex
) -> None:
    pypi.add("sympy", "1.13")
    pypi.add("torch", "2.7.0", needs=["sympy>=1"])
    pypi.without_head = True  # some servers have nothing but GET

    report = check(resolver, intel)

    assert sentences(report) == []
    found = report.as_dict()
    assert found["resolved"] == {"torch": "2.7.0", "oneccl-bind-pt": "2.7.0+cpu", "sympy": "1.13"}
    assert found["ok"] is True


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


def test_conflicting_packages_are_named(
    resolver: Resolver, pypi: PackageIndex, intel: PackageIndex
) -> None:
    tag = "cp310-cp310-linux_x86_64"
    intel.add("oneccl-bind-pt", "2.7.0+cpu", tag, needs=["torch==2.6.0"])

    (sentence,) = sentences(check(resolver, intel))

    assert sentence.startswith("No solution found when resolving dependencies: ")
    assert "depends on torch==2.6.0" in sentence
    assert "you require torch==2.7.0" in sentence


def test_an_index_that_does_not_answer_is_named_in_bounded_time(
    resolver: Resolver, intel: PackageIndex
) -> None:
    intel.silent.add("/")

    report = check(replace(resolver, answer_s=0.5), intel)

    assert report.problems == (
        Problem(f"{intel.url} did not answer within 0.5 s", index=intel.url),
    )


def test_an_index_that_stops_answering_is_named(resolver: Resolver, intel: PackageIndex) -> None:
    intel.silent |= {"/torch/", "/oneccl-bind-pt/"}

    report = check(replace(resolver, answer_s=1), intel)

    (problem,) = report.problems
    assert "Failed to fetch" in problem.sentence
    assert f"{intel.url}/" in problem.sentence
    assert "timed out" in problem.sentence
    assert problem.index == intel.url
    assert report.packages == ()


def test_the_time_of_a_whole_check_is_limited(resolver: Resolver, intel: PackageIndex) -> None:
    intel.silent |= {"/torch/", "/oneccl-bind-pt/"}

    report = check(replace(resolver, answer_s=20), intel, limit_s=2)

    assert sentences(report) == ["uv did not finish within 2 s"]


def test_pages_of_links_pip_and_examples_are_checked_too(
    resolver: Resolver, pypi: PackageIndex, intel: PackageIndex
) -> None:
    page, archive = f"{intel.url}/links", f"{intel.url}/v4.tar.gz"
    more: dict[str, Any] = {
        "indexes": [],
        "find_links": [page],
        "pip": "25.0.1",
        "examples": archive,
    }
    report = check(resolver, intel, **more)

    assert sentences(report) == [
        f"{archive} answers 404 Not Found",
        f"pip==25.0.1 is not available for Python 3.10 on Ubuntu 22.04: on {pypi.url}, {page} "
        "there is no version of it",
    ]


def test_an_address_without_a_server_cannot_be_reached() -> None:
    with serve_index() as index:
        url = index.url
    (problem,) = probe_all([url], set(), limit_s=5)
    assert problem.sentence.startswith(f"{url} can't be reached: ")


def test_an_index_may_refuse_its_first_page(intel: PackageIndex) -> None:
    intel.statuses["/"] = 403
    url = f"{intel.url}/"
    assert probe_all([url], set(), limit_s=5) == []
    assert probe_all([url], {url}, limit_s=5) == [
        Problem(f"{url} answers 403 Forbidden", index=url)
    ]
