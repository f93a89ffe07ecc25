"""Check that all parts of a stack are available: uv resolves its packages as a node would.

Options: https://docs.astral.sh/uv/reference/cli/#uv-pip-compile
"""

from __future__ import annotations

import ast
import importlib.util
import math
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from uv import find_uv_bin

from infra.ec2.images import RELEASES
from infra.wait import Progress
from provision.stacks.lock import Pinned, requirements
from provision.stacks.stack import Stack, parse_requirement

# Of the Ubuntu releases with these Pythons: markers can also depend on the patch release.
_PYTHON_PATCHES = {"3.8": "3.8.10", "3.10": "3.10.12", "3.12": "3.12.3"}
PYPI = "https://pypi.org/simple"
# Nodes install with pip, so only pip's configuration counts; these settings don't affect resolution.
_KEPT_VARIABLES = ("UV_CACHE_DIR", "UV_NO_CACHE", "UV_NATIVE_TLS", "UV_SYSTEM_CERTS")
_SETTING = re.compile(r"^(global|install|:env:)\.([a-z-]+)=(.*)$", re.MULTILINE)
# The frame that uv draws around errors.
_FRAME = str.maketrans(dict.fromkeys("×╰├─▶│", " "))


@dataclass(frozen=True)
class NodePython:
    """A node's Python, such as ``3.12.3``, and its C library, such as ``2.39``."""

    version: str
    glibc: str

    @property
    def options(self) -> tuple[str, ...]:
        # The newest that uv knows; a newer C library, such as Debian 13's, also runs its wheels.
        minor = min(int(self.glibc.split(".")[1]), 40)
        platform = f"x86_64-manylinux_2_{minor}"
        return ("--python-version", self.version, "--python-platform", platform)


@dataclass(frozen=True)
class Sources:
    """Package indexes, the main one first, and pages of links."""

    indexes: tuple[str, ...]
    find_links: tuple[str, ...] = ()

    def __add__(self, other: Sources) -> Sources:
        return Sources(self.indexes + other.indexes, self.find_links + other.find_links)

    @property
    def options(self) -> tuple[str, ...]:
        main, *others = self.indexes
        extra = (f"--extra-index-url={url}" for url in others)
        links = (f"--find-links={url}" for url in self.find_links)
        # As pip does: the best version of all indexes, not the first index that has the package.
        return (f"--index-url={main}", *extra, *links, "--index-strategy=unsafe-best-match")


@dataclass(frozen=True)
class PipConfiguration:
    """This machine's pip configuration: the main index, further sources, and how to connect."""

    index: str = PYPI
    sources: Sources = Sources(())
    options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Resolution:
    """Compatible packages, or why there are none. ``unsolvable``: the requirements contradict each other."""

    packages: tuple[Pinned, ...] = ()
    error: str = ""
    unsolvable: bool = False


@dataclass(frozen=True)
class Resolver:
    """uv with a pip configuration. ``answer_s`` limits each request."""

    uv: str
    configuration: PipConfiguration
    answer_s: float = 10

    def resolve(
        self,
        requirements: Sequence[str],
        target: NodePython,
        sources: Sources,
        limit_s: float,
        *options: str,
        binary: bool = True,
    ) -> Resolution:
        """Resolve requirements, with all dependencies, for the target; only wheels if ``binary``."""
        sources += self.configuration.sources
        argv = [self.uv, "pip", "compile", "-", "--quiet", "--no-config", "--color=never"]
        argv += ["--no-header", "--no-annotate", "--python", sys.executable]
        argv += ["--only-binary", ":all:"] if binary else []
        argv += [*target.options, *sources.options]
        try:
            done = subprocess.run(
                [*argv, *self.configuration.options, *options],
                input="\n".join(requirements),
                env=self._environment(),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Resolution(error=f"uv did not finish within {limit_s:.0f} s")
        if done.returncode:
            return Resolution((), explain(done.stderr), "No solution found" in done.stderr)
        return Resolution(parse_pins(done.stdout))

    def _environment(self) -> dict[str, str]:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("UV_") or name in _KEPT_VARIABLES
        }
        patience = {"UV_HTTP_TIMEOUT": str(math.ceil(self.answer_s)), "UV_HTTP_RETRIES": "0"}
        return {**self.configuration.environment, **inherited, **patience}


def find_resolver(*, isolated: bool = False) -> Resolver:
    """Return uv with pip's configuration, or with none if ``isolated``."""
    configuration = PipConfiguration() if isolated else read_pip_configuration()
    return Resolver(find_uv_bin(), configuration)


def read_pip_configuration() -> PipConfiguration:
    """Return the part of pip's configuration that affects what it finds."""
    has_pip = importlib.util.find_spec("pip") is not None
    pip = [sys.executable, "-m", "pip"] if has_pip else ["pip3"]
    try:
        done = subprocess.run(
            [*pip, "config", "list"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return PipConfiguration()
    return parse_pip_configuration(done.stdout)


def parse_pip_configuration(text: str) -> PipConfiguration:
    """Parse the output of ``pip config list``; the environment overrides ``install``, that ``global``."""
    found = _SETTING.findall(text)
    known: dict[str, str] = {}
    for section in ("global", "install", ":env:"):
        known |= {key: ast.literal_eval(value) for where, key, value in found if where == section}

    def sources(key: str) -> tuple[str, ...]:
        # pip ignores folders that do not exist; uv would fail.
        return tuple(url for url in known.get(key, "").split() if not is_missing_folder(url))

    trusted = known.get("trusted-host", "").split()
    variables = {"SSL_CERT_FILE": known.get("cert", ""), "ALL_PROXY": known.get("proxy", "")}
    options = [f"--allow-insecure-host={host}" for host in trusted]
    if known.get("no-index", "").lower() in ("1", "true", "yes", "on", "t", "y"):
        options.append("--no-index")
    return PipConfiguration(
        known.get("index-url", PYPI),
        Sources(sources("extra-index-url"), sources("find-links")),
        tuple(options),
        {name: value for name, value in variables.items() if value},
    )


def without_login(url: str) -> str:
    """Return an address without its user name and password, which companies put into pip's settings."""
    return re.sub(r"//[^/]*@", "//", url)


def is_missing_folder(url: str) -> bool:
    """Whether an address names a local folder that does not exist."""
    path = url.removeprefix("file://")
    return "://" not in path and not Path(path).exists()


def parse_pins(text: str) -> tuple[Pinned, ...]:
    """Parse ``uv pip compile``'s output: ``name==version``, with ``--hash`` options on later lines."""
    pins = []
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.startswith("#"):
            pin, *hashes = line.split()
            name, _, version = pin.partition("==")
            sha256 = (each.removeprefix("--hash=sha256:") for each in hashes if "=sha256:" in each)
            pins.append(Pinned(name, version, tuple(sha256)))
    return tuple(pins)


def explain(errors: str) -> str:
    """Return uv's error output as one line."""
    words = " ".join(errors.translate(_FRAME).split()).removeprefix("error: ")
    return words.replace(" cause: ", ": ").replace(" Caused by: ", ": ") or "uv failed silently"


@dataclass(frozen=True)
class Problem:
    """A problem in one sentence, with the package or index that it concerns, if any."""

    sentence: str
    package: str = ""
    index: str = ""


@dataclass(frozen=True)
class SourcesReport:
    """The result for one stack; ``packages`` are those that a node would install."""

    stack: Stack
    sources: tuple[str, ...]
    problems: tuple[Problem, ...]
    packages: tuple[Pinned, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {
            "stack": self.stack.name,
            "ok": not self.problems,
            "ubuntu": self.stack.ubuntu,
            "python": self.stack.python,
            "sources": list(self.sources),
            "problems": [asdict(problem) for problem in self.problems],
            "resolved": {package.name: package.version for package in self.packages},
        }


def describe_target(stack: Stack) -> str:
    """Return the machine that a stack's packages are for."""
    return f"Python {stack.python} on Ubuntu {stack.ubuntu}"


def check_sources(
    stack: Stack, resolver: Resolver, progress: Progress, *, limit_s: float, hashes: bool = False
) -> SourcesReport:
    """Resolve a stack's packages together, and query its examples.

    uv connects as pip would, with its proxy and certificates, and fails for a source that does not answer:
    without that index, another build would be chosen, such as PyPI's torch for CUDA.
    Takes at most about ``limit_s`` seconds. With ``hashes``, downloads files whose index has no hash.
    """
    end = time.monotonic() + limit_s
    glibc = f"2.{RELEASES[stack.ubuntu].glibc_minor}"
    target = NodePython(_PYTHON_PATCHES.get(stack.python, stack.python), glibc)
    sources = Sources((resolver.configuration.index, *stack.indexes), stack.find_links)
    named = (*sources.indexes, *sources.find_links, *filter(None, [stack.examples]))

    def resolve(texts: Sequence[str], *options: str) -> Resolution:
        left = max(end - time.monotonic(), 0.1)
        return resolver.resolve(texts, target, sources, left, *options)

    shown = tuple(map(without_login, named))
    hosts = dict.fromkeys(urlsplit(url).netloc or url for url in shown)
    progress.note(f"resolving all packages together from {', '.join(hosts)}")
    # uv ignores a missing folder.
    missing = [url for url in sources.indexes if url.startswith("file:") and is_missing_folder(url)]
    problems = [Problem(f"{url} does not exist", index=url) for url in missing]
    found = Resolution()
    if not missing:
        # uv's cache would hide for ten minutes that an index has failed.
        options = ["--refresh", *(["--generate-hashes"] if hashes else [])]
        found = resolve(requirements(stack), *options)
    if found.unsolvable:
        problems += list(_find_unavailable(stack, sources, resolve))
    if found.error and not problems:
        index = next((url for url in named if url in found.error), "")
        problems.append(Problem(found.error, index=index))
    if why := _try_examples(stack.examples, min(resolver.answer_s, limit_s)):
        problems.append(Problem(f"{stack.examples} can't be read: {why}", index=stack.examples))
    return SourcesReport(stack, shown, tuple(problems), found.packages)


def _find_unavailable(
    stack: Stack, sources: Sources, resolve: Callable[..., Resolution]
) -> Iterator[Problem]:
    """A problem for every requirement that no source satisfies on its own."""
    where = ", ".join(map(without_login, (*sources.indexes, *sources.find_links)))
    for text in requirements(stack):
        requirement = parse_requirement(text)
        if requirement and resolve([text], "--no-deps").unsolvable:
            newest = [
                package.version for package in resolve([requirement.name], "--no-deps").packages
            ]
            there = f"the newest version is {newest[0]}" if newest else "there is no version of it"
            sentence = f"{text} is not available for {describe_target(stack)}: on {where} {there}"
            yield Problem(sentence, requirement.name)


def _try_examples(url: str, limit_s: float) -> str:
    """Return why an address can't be read; "" if it can. Nodes read it without pip's settings as well."""
    try:
        if url:
            urllib.request.urlopen(url, timeout=limit_s).close()
    except urllib.error.HTTPError as error:
        with error:
            return str(error)
    except (OSError, ValueError) as error:
        return str(error).strip("<>")
    return ""
