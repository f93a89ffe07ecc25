"""pip as a resolver only: what the indexes have, and whether requirements fit together; nothing is installed.

Options: https://pip.pypa.io/en/stable/cli/pip_install/ and https://pip.pypa.io/en/stable/cli/pip_index/
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from infra.errors import SprError
from infra.ubuntu import RELEASES
from provision.needs import Needs, Wheel, find_needs

# --dry-run with --report came with 22.2: https://pip.pypa.io/en/stable/news/#v22-2
_OLDEST = (22, 2)
# Seen in November 2026: 25.0 still downloads every wheel of a dry run, 25.3 reads their metadata alone.
_FRUGAL = (25, 3)
# The C library of each Ubuntu release decides which wheels run on it (PEP 600).
_GLIBC_MINOR = {name: ubuntu.glibc_minor for name, ubuntu in RELEASES.items()}
# What this machine's markers hid shows up round by round: a package, and then what that one needs.
_ROUNDS = 8
# Between two parts of a file.
_DOWNLOAD_S = 60
_SKIPPED = re.compile(r"Could not fetch URL (\S+?): (.*?)(?: - skipping)?$", re.MULTILINE)
_AVAILABLE = re.compile(r"^Available versions: (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Target:
    """The machine that wheels are for, which need not be this one."""

    ubuntu: str
    python: str

    @property
    def options(self) -> tuple[str, ...]:
        newest = _GLIBC_MINOR[self.ubuntu]
        tags = [f"manylinux_2_{minor}" for minor in range(newest, 4, -1)]
        tags += ["manylinux2014", "manylinux2010", "manylinux1", "linux"]
        platforms = [option for tag in tags for option in ("--platform", f"{tag}_x86_64")]
        python = ["--python-version", self.python, "--implementation", "cp"]
        return (*python, *platforms, "--only-binary=:all:")


@dataclass(frozen=True)
class Sources:
    """Where pip looks: indexes, the main one first, and pages of links."""

    indexes: tuple[str, ...]
    find_links: tuple[str, ...] = ()

    @property
    def options(self) -> tuple[str, ...]:
        main, *others = self.indexes
        extra = [option for url in others for option in ("--extra-index-url", url)]
        links = [option for url in self.find_links for option in ("--find-links", url)]
        return ("--index-url", main, *extra, *links)


@dataclass(frozen=True)
class Found:
    """A package's versions for a target, newest first, and the pages that gave none: (address, why)."""

    versions: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]
    timed_out: bool = False


class Reason(Enum):
    """Why there is no resolution."""

    NONE = "it is resolved"
    CONFLICT = "versions that exclude one another"
    MISSING = "something that no index has"
    TIME = "the time was over"
    OTHER = "pip or a server failed"


@dataclass(frozen=True)
class Resolved:
    """The wheels that fit together, those of what they need included; or why there are none."""

    wheels: tuple[Wheel, ...]
    reason: Reason = Reason.NONE
    error: str = ""


@dataclass(frozen=True)
class Pip:
    """A pip of this machine. ``isolated``: without its configuration; ``answer_s``: per request."""

    command: tuple[str, ...]
    isolated: bool = False
    answer_s: float = 10
    version: tuple[int, int] = _FRUGAL

    @property
    def downloads(self) -> bool:
        """It downloads whole wheels to resolve, and throws them away."""
        return self.version < _FRUGAL

    def main_index(self) -> str:
        """The index that stands for PyPI here: from pip's configuration, else PyPI itself."""
        output = self._run(["config", "list"], 30)[1] if not self.isolated else ""
        # In the order in which they count: files, then the environment.
        values = re.findall(r"^(?:global|install|:env:)\.index-url='(.*)'$", output, re.MULTILINE)
        return values[-1] if values else "https://pypi.org/simple"

    def configured_sources(self) -> tuple[str, ...]:
        """Further sources of this machine's own pip configuration, which another machine lacks."""
        output = self._run(["config", "list"], 30)[1] if not self.isolated else ""
        found = re.findall(
            r"^\S+\.(?:extra-index-url|find-links)='(.*)'$",
            output.replace("\\n", " "),
            re.MULTILINE,
        )
        return tuple(dict.fromkeys(url for value in found for url in value.split()))

    def find_versions(
        self, package: str, target: Target, sources: Sources, deadline_s: float
    ) -> Found:
        """What the sources have of one package for the target."""
        # Only at this verbosity pip tells which pages it could not read.
        argv = ["index", "versions", package, "-vv", *self._patience, *target.options]
        code, output = self._run([*argv, *sources.options], deadline_s)
        versions = _AVAILABLE.search(output)
        skipped = [(url, why) for url, why in _SKIPPED.findall(output) if "404 " not in why]
        return Found(
            tuple(versions[1].split(", ")) if versions else (), tuple(skipped), code is None
        )

    def resolve(
        self, requirements: Sequence[str], target: Target, sources: Sources, deadline_s: float
    ) -> Resolved:
        """Let pip find versions that fit together, those that they need on the target included."""
        end = time.monotonic() + deadline_s
        asked = tuple(requirements)
        for _ in range(_ROUNDS):
            found = self._resolve_here(asked, target, sources, end)
            needs = find_needs(requirements, found.wheels, target.python)
            if found.error or not needs.unmet:
                return Resolved(needs.wheels, found.reason, found.error)
            asked = (*asked, *needs.unmet)
        return Resolved((), Reason.OTHER, _tell_unmet(needs, target))

    def _resolve_here(
        self, requirements: Sequence[str], target: Target, sources: Sources, end: float
    ) -> Resolved:
        """What pip finds, which reads markers as for the Python that it runs on."""
        # Where a wheel's metadata can be read alone, the wheel itself stays where it is.
        found = self._resolve(["--use-feature=fast-deps", *requirements], target, sources, end)
        if found.reason == Reason.OTHER:
            # Not every server takes the requests that this needs; by default pip takes whole files.
            found = self._resolve(requirements, target, sources, end)
        return found

    def _resolve(
        self, requirements: Sequence[str], target: Target, sources: Sources, end: float
    ) -> Resolved:
        left = max(end - time.monotonic(), 0.1)
        with tempfile.TemporaryDirectory(prefix="spr-cluster-") as folder:
            report = Path(folder, "report.json")
            argv = ["install", "--dry-run", "--ignore-installed", "--report", str(report)]
            argv += ["--target", f"{folder}/target", *self._patience, *target.options]
            code, output = self._run([*argv, *sources.options, *requirements], left)
            if code == 0:
                return Resolved(_read_report(report.read_text()))
        if code is None:
            return Resolved((), Reason.TIME, f"pip did not come to an end within {left:.0f} s")
        return explain(output)

    @property
    def _patience(self) -> tuple[str, ...]:
        return ("--timeout", f"{self.answer_s:g}", "--retries", "0", "--no-input")

    def _run(self, argv: Sequence[str], deadline_s: float) -> tuple[int | None, str]:
        """The exit code, ``None`` where the time was over, and all output."""
        common = ["--disable-pip-version-check", "--no-color"]
        common += ["--isolated"] if self.isolated else []
        try:
            done = subprocess.run(
                [*self.command, *argv, *common],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=max(deadline_s, 0.1),
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            output = late.stdout or b""
            return None, output.decode(errors="replace") if isinstance(output, bytes) else output
        return done.returncode, done.stdout


def find_pip(*, isolated: bool = False, answer_s: float = 10) -> Pip:
    """A pip of this machine that can resolve without installing; raises :class:`SprError`."""
    candidates: list[tuple[str, ...]] = []
    if importlib.util.find_spec("pip"):
        candidates.append((sys.executable, "-m", "pip"))
    candidates += [(path,) for path in map(shutil.which, ("pip3", "pip")) if path]
    seen, able = [], []
    for command in candidates:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
        match = re.match(r"pip (\d+)\.(\d+)", done.stdout)
        seen.append(f"{' '.join(command)} is {match[0] if match else 'broken'}")
        version = (int(match[1]), int(match[2])) if match else (0, 0)
        if version >= _OLDEST:
            able.append(Pip(command, isolated, answer_s, version))
    frugal = [pip for pip in able if not pip.downloads]
    for pip in frugal + able:
        return pip
    raise SprError(
        f"no pip from {'.'.join(map(str, _OLDEST))} on here ({'; '.join(seen) or 'none at all'})",
        hint="python3 -m pip install --upgrade pip, or apt-get install python3-pip",
    )


def _read_report(text: str) -> tuple[Wheel, ...]:
    # https://pip.pypa.io/en/stable/reference/installation-report/
    return tuple(_read_item(item) for item in json.loads(text)["install"])


def _read_item(item: dict[str, Any]) -> Wheel:
    about, source = item["metadata"], item["download_info"]
    return Wheel(
        canonicalize_name(about["name"]),
        about["version"],
        source["url"],
        source.get("archive_info", {}).get("hashes", {}).get("sha256", ""),
        tuple(about.get("requires_dist", ())),
    )


def _tell_unmet(needs: Needs, target: Target) -> str:
    return f"pip did not find what else Python {target.python} needs: {', '.join(needs.unmet)}"


def hash_wheel(wheel: Wheel, end: float) -> str:
    """A wheel's SHA-256: its index's word, else of the file itself; raises :class:`SprError`.

    ``end`` is by ``time.monotonic()``.
    """
    if wheel.sha256:
        return wheel.sha256
    digest = hashlib.sha256()
    try:
        with urllib.request.urlopen(wheel.url, timeout=_DOWNLOAD_S) as answer:
            while part := answer.read(1 << 20):
                digest.update(part)
                if time.monotonic() > end:
                    raise TimeoutError("the time was over before the file was there")
    except (OSError, ValueError) as error:
        raise SprError(f"{wheel.url}, whose index gives no SHA-256: {error}") from None
    return digest.hexdigest()


def explain(output: str) -> Resolved:
    """pip's reason, also as one sentence, from what it printed."""
    conflict = re.search(r"The conflict is caused by:\n((?:[ \t]+\S.*\n?)+)", output)
    if conflict:
        parts = [line.strip() for line in conflict[1].splitlines()]
        return Resolved((), Reason.CONFLICT, f"these don't fit together: {'; '.join(parts)}")
    missing = re.search(
        r"satisfies the requirement (\S+)(?: \(from (?!versions)(.*?)\))? \(from versions: (.*?)\)\s*$",
        output,
        re.MULTILINE,
    )
    if missing:
        who = f"{missing[2]} needs {missing[1]}" if missing[2] else missing[1]
        there = ", ".join(reversed(missing[3].split(", ")[-5:]))
        fits = f"; there is {there}" if there != "none" else ""
        return Resolved((), Reason.MISSING, f"{who}, which no index has{fits}")
    errors = re.findall(r"^ERROR: (.*)$", output, re.MULTILINE)
    return Resolved((), Reason.OTHER, errors[-1] if errors else "pip failed without a reason")
