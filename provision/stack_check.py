"""Check, before any machine is bought, that every part of a stack is available."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

from infra.wait import Progress
from provision.resolver import Resolution, Resolver, Sources, Target, is_missing_folder
from provision.stacks.lock import Pinned, requirements
from provision.stacks.stack import Stack
from provision.stacks.versions import parse_requirement


@dataclass(frozen=True)
class Problem:
    """One sentence about what is wrong, with the package or the index that it concerns, if any."""

    sentence: str
    package: str = ""
    index: str = ""


@dataclass(frozen=True)
class SourcesReport:
    """The outcome for one stack; ``packages`` are those that a node would install."""

    stack: str
    target: Target
    sources: tuple[str, ...]
    problems: tuple[Problem, ...]
    packages: tuple[Pinned, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {
            "stack": self.stack,
            "ok": not self.problems,
            "ubuntu": self.target.ubuntu,
            "python": self.target.python,
            "sources": list(self.sources),
            "problems": [asdict(problem) for problem in self.problems],
            "resolved": {package.name: package.version for package in self.packages},
        }


def check_sources(
    stack: Stack, resolver: Resolver, progress: Progress, *, limit_s: float, hashes: bool = False
) -> SourcesReport:
    """Query every address that a stack names, then resolve its packages together.

    Ends within about ``limit_s`` seconds. With ``hashes``, downloads what has none on its index.
    """
    end = time.monotonic() + limit_s
    target = Target(stack.ubuntu, stack.python)
    sources = Sources((resolver.configuration.index, *stack.indexes), stack.find_links)
    named = (*sources.indexes, *sources.find_links, *filter(None, [stack.examples]))
    hosts = dict.fromkeys(urlsplit(url).netloc or url for url in named)
    progress.note(f"querying {', '.join(hosts)}")
    # An index may refuse its first page and still serve the packages' pages.
    strict = {*stack.find_links, stack.examples}
    problems = probe_all(named, strict, min(resolver.answer_s, limit_s))
    packages: tuple[Pinned, ...] = ()
    # Without one index another's build would be chosen, such as PyPI's torch for CUDA.
    if all(problem.index == stack.examples for problem in problems):

        def resolve(texts: Sequence[str], *options: str) -> Resolution:
            left = max(end - time.monotonic(), 0.1)
            return resolver.resolve(texts, target, sources, left, *options)

        progress.note("resolving all packages together")
        found = resolve(requirements(stack), *(["--generate-hashes"] if hashes else []))
        packages = found.packages
        if found.unsolvable:
            problems += list(_find_unavailable(stack, target, sources, resolve))
        if found.error and not any(problem.package for problem in problems):
            index = next((url for url in named if url in found.error), "")
            problems.append(Problem(found.error, index=index))
    return SourcesReport(stack.name, target, named, tuple(problems), packages)


def _find_unavailable(
    stack: Stack, target: Target, sources: Sources, resolve: Callable[..., Resolution]
) -> Iterator[Problem]:
    """A problem for every requirement of the stack that no source meets, whatever the others are."""
    where = ", ".join((*sources.indexes, *sources.find_links))
    for text in requirements(stack):
        requirement = parse_requirement(text)
        if requirement and resolve([text], "--no-deps").unsolvable:
            newest = [
                package.version for package in resolve([requirement.name], "--no-deps").packages
            ]
            there = f"the newest version is {newest[0]}" if newest else "there is no version of it"
            sentence = f"{text} is not available for {target}: on {where} {there}"
            yield Problem(sentence, requirement.name)


def probe_all(urls: Sequence[str], strict: set[str], limit_s: float) -> list[Problem]:
    """A problem for every address that does not answer as it should."""
    distinct = list(dict.fromkeys(urls))
    with ThreadPoolExecutor(len(distinct)) as pool:
        reasons = pool.map(lambda url: _probe(url, strict=url in strict, limit_s=limit_s), distinct)
    found = zip(distinct, reasons, strict=True)
    return [Problem(f"{url} {why}", index=url) for url, why in found if why]


def _probe(url: str, *, strict: bool, limit_s: float) -> str:
    """Why an address can't be used; empty if it can. ``strict``: refusals count, too."""
    if url.startswith("file:"):
        return "does not exist" if is_missing_folder(url) else ""
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
