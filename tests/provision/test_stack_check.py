"""`stacks check` against indexes of the tests' own, with pip itself asking."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from infra.progress import Silent
from provision.pip import Pip, Target, find_pip
from provision.stack_check import SourcesReport, check_sources, probe
from provision.stacks import Stack, load_stack
from tests.provision.package_index import PackageIndex, serve_index

PACKAGES = ("torch==2.7.0", "oneccl-bind-pt==2.7.0")


@pytest.fixture
def pip(pypi: PackageIndex, monkeypatch: pytest.MonkeyPatch) -> Pip:
    """This machine's pip, with no configuration but one index in PyPI's place."""
    for name in [name for name in os.environ if name.startswith("PIP_") or "proxy" in name.lower()]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", pypi.url)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    return find_pip(answer_s=5)


@pytest.fixture
def pypi() -> Iterator[PackageIndex]:
    with serve_index() as index:
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


def check(pip: Pip, intel: PackageIndex, /, limit_s: float = 60, **changes: Any) -> SourcesReport:
    base = {"indexes": [intel.url], "python_packages": PACKAGES, **changes}
    stack = Stack.model_validate({**load_stack("intel").model_dump(), **base})
    return check_sources(stack, pip, Silent(), limit_s=limit_s)


def sentences(report: SourcesReport) -> list[str]:
    return [problem.sentence for problem in report.problems]


def test_a_stack_that_is_all_there_is_resolved_and_not_installed(
    pip: Pip, pypi: PackageIndex, intel: PackageIndex
) -> None:
    pypi.add("sympy", "1.13")
    pypi.add("torch", "2.7.0", needs=["sympy>=1"])
    pypi.without_head = True  # some servers have nothing but GET

    report = check(pip, intel)

    assert sentences(report) == []
    assert report.resolved == {"torch": "2.7.0", "oneccl-bind-pt": "2.7.0+cpu", "sympy": "1.13"}
    assert report.as_dict()["ok"] is True


def test_a_version_that_is_missing_is_named_with_those_that_are_there(
    pip: Pip, pypi: PackageIndex, intel: PackageIndex
) -> None:
    del intel.pages["/oneccl-bind-pt/"]["oneccl_bind_pt-2.7.0+cpu-cp310-cp310-linux_x86_64.whl"]

    report = check(pip, intel)

    assert sentences(report) == [
        "oneccl-bind-pt==2.7.0 is not to be had for Python 3.10 on Ubuntu 22.04: "
        f"on {pypi.url}, {intel.url} there is 2.6.0+cpu, 2.5.0+cpu"
    ]
    assert report.problems[0].package == "oneccl-bind-pt"
    assert report.resolved == {}


def test_wheels_for_another_python_do_not_count(pip: Pip, intel: PackageIndex) -> None:
    report = check(pip, intel, ubuntu="24.04", python="3.12")

    (sentence,) = sentences(report)
    assert sentence.startswith(
        "oneccl-bind-pt==2.7.0 is not to be had for Python 3.12 on Ubuntu 24.04"
    )
    assert sentence.endswith("there is no version of it")


def test_packages_that_do_not_fit_together_are_named(
    pip: Pip, pypi: PackageIndex, intel: PackageIndex
) -> None:
    tag = "cp310-cp310-linux_x86_64"
    intel.add("oneccl-bind-pt", "2.7.0+cpu", tag, needs=["torch==2.6.0"])

    (sentence,) = sentences(check(pip, intel))

    assert sentence.startswith("these don't fit together: ")
    assert "The user requested torch==2.7.0" in sentence
    assert "oneccl-bind-pt 2.7.0+cpu depends on torch==2.6.0" in sentence


def test_what_a_package_needs_and_nobody_has_is_named(
    pip: Pip, pypi: PackageIndex, intel: PackageIndex
) -> None:
    pypi.add("torch", "2.7.0", needs=["libfabric>=2.6"])

    assert sentences(check(pip, intel)) == ["torch needs libfabric>=2.6, which no index has"]


def test_an_index_that_does_not_answer_is_named_in_bounded_time(
    pip: Pip, intel: PackageIndex
) -> None:
    intel.silent.add("/")
    begin = time.monotonic()

    report = check(replace(pip, answer_s=0.5), intel)

    assert time.monotonic() - begin < 15
    silent, missing = report.problems
    assert silent.sentence == f"{intel.url} did not answer within 0.5 s"
    assert silent.index == intel.url
    assert missing.package == "oneccl-bind-pt"
    assert missing.sentence.endswith(f"there is no version of it; not asked: {intel.url}")


def test_an_index_that_breaks_off_is_named_once(pip: Pip, intel: PackageIndex) -> None:
    intel.silent |= {"/torch/", "/oneccl-bind-pt/"}

    report = check(replace(pip, answer_s=0.5), intel)

    slow, missing = report.problems
    assert slow.sentence == f"{intel.url} gave no answer about torch, oneccl-bind-pt: timed out"
    assert missing.package == "oneccl-bind-pt"
    assert report.resolved == {}


def test_the_time_of_a_whole_check_is_limited(
    pip: Pip, pypi: PackageIndex, intel: PackageIndex
) -> None:
    intel.silent |= {"/torch/", "/oneccl-bind-pt/"}
    begin = time.monotonic()

    report = check(replace(pip, answer_s=20), intel, limit_s=2)

    assert time.monotonic() - begin < 10
    where = f"{pypi.url}, {intel.url}"
    assert sentences(report) == [
        f"{text}: no answer from {where} in the time there was" for text in PACKAGES
    ]


def test_nothing_is_asked_of_packages_where_no_index_answers(
    pip: Pip, pypi: PackageIndex, intel: PackageIndex
) -> None:
    pypi.statuses["/"] = intel.statuses["/"] = 503

    report = check(pip, intel)

    assert sentences(report) == [
        f"{index.url} answers 503 Service Unavailable" for index in (pypi, intel)
    ]
    assert pypi.asked + intel.asked == ["/", "/"]


def test_pages_of_links_pip_and_examples_are_looked_for_too(
    pip: Pip, pypi: PackageIndex, intel: PackageIndex
) -> None:
    page, archive = f"{intel.url}/links", f"{intel.url}/v4.tar.gz"
    more: dict[str, Any] = {
        "indexes": [],
        "find_links": [page],
        "pip": "25.0.1",
        "examples": archive,
    }
    report = check(pip, intel, **more)

    assert sentences(report) == [
        f"{archive} answers 404 Not Found",
        f"pip==25.0.1 is not to be had for Python 3.10 on Ubuntu 22.04: on {pypi.url}, {page} "
        "there is no version of it",
    ]


@dataclass
class Notes(Silent):
    heard: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        self.heard.append(text)


def test_progress_tells_what_is_asked(pip: Pip, pypi: PackageIndex) -> None:
    notes = Notes()
    stack = Stack.model_validate(
        {**load_stack("upstream").model_dump(), "indexes": [], "python_packages": ["torch==2.7.0"]}
    )

    check_sources(stack, replace(pip, version=(25, 0)), notes, limit_s=60)

    host = pypi.url.removeprefix("http://")
    assert notes.heard == [
        f"asking {host}",
        "looking for torch==2.7.0",
        "resolving all packages together (pip 25.0 downloads them; 25.3 would not)",
    ]


def test_an_address_where_nobody_listens_can_not_be_reached() -> None:
    with serve_index() as index:
        url = index.url
    assert "can't be reached: " in probe(url, strict=False, limit_s=5)


def test_a_refused_first_page_is_fine_for_an_index_alone(intel: PackageIndex) -> None:
    intel.statuses["/"] = 403
    assert probe(f"{intel.url}/", strict=False, limit_s=5) == ""
    assert probe(f"{intel.url}/", strict=True, limit_s=5) == "answers 403 Forbidden"


def test_wheels_run_on_the_releases_own_c_library() -> None:
    old, new = Target("20.04", "3.8").options, Target("24.04", "3.12").options
    assert "manylinux_2_31_x86_64" in old
    assert "manylinux_2_32_x86_64" not in old
    assert "manylinux_2_39_x86_64" in new
    assert "linux_x86_64" in old  # as PyTorch's and Intel's own indexes name it
