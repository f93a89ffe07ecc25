"""Whether all that a stack is made of can be had, asked before a machine is bought."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from infra.progress import Progress
from provision.needs import Wheel
from provision.pip import Found, Pip, Sources, Target
from provision.stacks import Stack
from provision.stacks.lock import requirements
from provision.stacks.versions import Requirement, parse_requirement

_AT_ONCE = 4
_SHOWN_VERSIONS = 5


@dataclass(frozen=True)
class Problem:
    """One sentence about what is wrong; ``package`` and ``index`` are empty where it is of neither."""

    sentence: str
    package: str = ""
    index: str = ""


@dataclass(frozen=True)
class SourcesReport:
    """What was found of one stack; ``wheels`` are those that an installation would take."""

    stack: str
    target: Target
    sources: tuple[str, ...]
    problems: tuple[Problem, ...]
    wheels: tuple[Wheel, ...] = ()

    @property
    def resolved(self) -> dict[str, str]:
        """Their versions, by name."""
        return {wheel.name: wheel.version for wheel in self.wheels}

    def as_dict(self) -> dict[str, Any]:
        return {
            "stack": self.stack,
            "ok": not self.problems,
            "ubuntu": self.target.ubuntu,
            "python": self.target.python,
            "sources": list(self.sources),
            "problems": [asdict(problem) for problem in self.problems],
            "resolved": self.resolved,
        }


def check_sources(stack: Stack, pip: Pip, progress: Progress, *, limit_s: float) -> SourcesReport:
    """Ask every index, then for every package, then whether all fit together; installs nothing.

    It ends within about ``limit_s`` seconds, and says what it had no answer to by then.
    """
    end = time.monotonic() + limit_s
    target = Target(stack.ubuntu, stack.python)
    main = pip.main_index()
    named = (main, *stack.indexes, *stack.find_links, *filter(None, [stack.examples]))
    progress.note(f"asking {', '.join(map(_host, dict.fromkeys(named)))}")
    # An index's first page may be refused where its packages' pages are not.
    strict = {*stack.find_links, stack.examples}
    silent = _probe_all(named, strict, min(pip.answer_s, limit_s))
    problems = [Problem(f"{url} {why}", index=url) for url, why in silent.items()]
    sources = Sources(
        tuple(url for url in (main, *stack.indexes) if url not in silent),
        tuple(url for url in stack.find_links if url not in silent),
    )
    not_asked = tuple(url for url in silent if url != stack.examples)
    ask = _Question(stack, pip, target, sources, not_asked)
    missing = ask.find_missing(progress, end) if sources.indexes else []
    wheels: tuple[Wheel, ...] = ()
    # With something missing pip would fail again; with an index missing it would take other builds,
    # such as PyPI's torch for CUDA, gigabytes large.
    if not missing and not not_asked:
        much = f" (pip {pip.version[0]}.{pip.version[1]} downloads them; 25.3 would not)"
        progress.note(f"resolving all packages together{much if pip.downloads else ''}")
        found = pip.resolve(requirements(stack), target, sources, _left(end))
        wheels = found.wheels
        missing = [Problem(found.error)] if found.error else []
    return SourcesReport(stack.name, target, named, (*problems, *missing), wheels)


@dataclass(frozen=True)
class _Question:
    """What is asked of the sources that answer; ``silent`` are those that do not."""

    stack: Stack
    pip: Pip
    target: Target
    sources: Sources
    silent: tuple[str, ...]

    def find_missing(self, progress: Progress, end: float) -> list[Problem]:
        """A problem for every package that is not there, and for every index that broke off."""
        asked = [found for found in map(parse_requirement, requirements(self.stack)) if found]

        def ask(requirement: Requirement) -> Found:
            progress.note(f"looking for {requirement.text}")
            return self.pip.find_versions(requirement.name, self.target, self.sources, _left(end))

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = dict(zip(asked, pool.map(ask, asked), strict=True))
        problems = [self._judge(requirement, answer) for requirement, answer in found.items()]
        return _broken_off(self.sources, found) + [problem for problem in problems if problem]

    def _judge(self, requirement: Requirement, found: Found) -> Problem | None:
        name, text = requirement.name, requirement.text
        asked = (*self.sources.indexes, *self.sources.find_links)
        if any(requirement.accepts(version) for version in found.versions):
            return None
        where = ", ".join(asked)
        if found.timed_out:
            return Problem(f"{text}: no answer from {where} in the time there was", name, asked[-1])
        target = f"Python {self.target.python} on Ubuntu {self.target.ubuntu}"
        there = ", ".join(found.versions[:_SHOWN_VERSIONS])
        fits = f"there is {there}" if there else "there is no version of it"
        sentence = f"{text} is not to be had for {target}: on {where} {fits}"
        if self.silent:
            sentence += f"; not asked: {', '.join(self.silent)}"
        return Problem(sentence, name, asked[-1])


def _broken_off(sources: Sources, found: Mapping[Requirement, Found]) -> list[Problem]:
    """One sentence per index, however many packages it gave no answer about."""
    by_index: dict[str, list[str]] = {}
    reasons: dict[str, str] = {}
    for requirement, answer in found.items():
        for page, why in answer.skipped:
            index = _owner(page, (*sources.indexes, *sources.find_links))
            by_index.setdefault(index, []).append(requirement.name)
            late = "timed out" in why or "didn't respond within" in why  # pip's words, old and new
            reasons[index] = "timed out" if late else why
    return [
        Problem(
            f"{index} gave no answer about {', '.join(packages)}: {reasons[index]}", index=index
        )
        for index, packages in by_index.items()
    ]


def _owner(page: str, sources: Sequence[str]) -> str:
    owners = [source for source in sources if page.startswith(source.rstrip("/"))]
    return max(owners, key=len, default=page)


def _host(url: str) -> str:
    return urlsplit(url).netloc or url


def _left(end: float) -> float:
    return max(end - time.monotonic(), 0.1)


def _probe_all(urls: Sequence[str], strict: set[str], limit_s: float) -> dict[str, str]:
    """The addresses that can't be used, each with the reason."""
    asked = list(dict.fromkeys(urls))
    probes = [_Probe(url, url in strict, limit_s) for url in asked]
    for probe in probes:
        probe.start()
    end = time.monotonic() + limit_s
    for probe in probes:
        probe.join(max(end - time.monotonic(), 0))
    late = f"did not answer within {limit_s:g} s"
    return {p.url: late if p.is_alive() else p.reason for p in probes if p.is_alive() or p.reason}


class _Probe(threading.Thread):
    """One request whose time is limited whatever the server does, so it is a thread to be left."""

    def __init__(self, url: str, strict: bool, limit_s: float) -> None:
        super().__init__(daemon=True)
        self.url, self.strict, self.limit_s = url, strict, limit_s
        self.reason = ""

    def run(self) -> None:
        self.reason = probe(self.url, strict=self.strict, limit_s=self.limit_s)


def probe(url: str, *, strict: bool, limit_s: float) -> str:
    """Why an address can't be used; empty where it can."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        return "" if Path(parts.path).exists() else "is not there"
    try:
        urllib.request.urlopen(url, timeout=limit_s).close()
    except urllib.error.HTTPError as error:
        refused = error.code >= 500 or strict
        return f"answers {error.code} {error.reason}" if refused else ""
    except (OSError, ValueError) as error:
        why = str(getattr(error, "reason", error))
        if "timed out" in why:
            return f"did not answer within {limit_s:g} s"
        return f"can't be reached: {why}"
    return ""
