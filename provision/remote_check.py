"""A stack's sources, asked from a machine that is as its nodes will be; nothing of it is kept."""

from __future__ import annotations

import re
import time
from dataclasses import replace

from infra.progress import Progress
from provision.host import Host
from provision.pip import OLDEST, Pip, Target, read_version
from provision.place import OnHost
from provision.stack_check import Problem, SourcesReport, check_sources
from provision.stacks import Stack

_APT = ("sudo", "apt-get", "-q", "-o", "DPkg::Lock::Timeout=600", "-o", "Acquire::Retries=3")
_REASON = re.compile(r"^(?:E|Err(?::\d+)?): ?(.*)$", re.MULTILINE)


def check_from_host(
    host: Host, stack: Stack, progress: Progress, *, limit_s: float
) -> SourcesReport:
    """Ask for the system packages, then as :func:`check_sources` does, by a new pip of the machine's.

    It ends within about ``limit_s`` seconds. Raises :class:`HostError` where the machine is lost.
    """
    end = time.monotonic() + limit_s
    place = OnHost(host)
    progress.note("asking for the system packages")
    problems = [Problem(sentence) for sentence in _find_missing_packages(place, stack, end)]
    progress.note("making an environment with a new pip")
    pip = _make_pip(place, stack, end)
    if pip is None:
        lowest = ".".join(map(str, OLDEST))
        problems.append(Problem(f"no environment with pip {lowest} or newer can be made there"))
        return SourcesReport(stack.name, Target(stack.ubuntu, stack.python), (), tuple(problems))
    report = check_sources(stack, pip, progress, limit_s=_left(end))
    return replace(report, problems=(*problems, *report.problems))


def _left(end: float) -> float:
    return max(end - time.monotonic(), 1)


def _find_missing_packages(place: OnHost, stack: Stack, end: float) -> list[str]:
    """A sentence for each thing that apt says against them."""
    code, output = place.run((*_APT, "update"), _left(end))
    if code != 0:
        return _explain("Ubuntu's package lists can't be read", code, output)
    wanted = ("install", "--dry-run", "--no-install-recommends", *stack.system_packages)
    code, output = place.run((*_APT, *wanted), _left(end))
    return _explain("system packages", code, output) if code != 0 else []


def _explain(what: str, code: int | None, output: str) -> list[str]:
    reasons = list(dict.fromkeys(_REASON.findall(output)))
    if code is None:
        reasons = ["no answer in the time there was"]
    return [f"{what}: {reason}" for reason in reasons or ["apt-get failed without a reason"]]


def _make_pip(place: OnHost, stack: Stack, end: float) -> Pip | None:
    """A pip that can resolve without installing; ``None`` where there is no way to one."""
    venv = f"{place.work}/venv"

    def run(*argv: str) -> tuple[int | None, str]:
        return place.run(argv, _left(end))

    if run("python3", "-m", "venv", venv)[0] != 0:
        # Ubuntu's own images lack a part of it.
        run(*_APT, "install", "-y", "--no-install-recommends", "python3-venv")
        run("python3", "-m", "venv", "--clear", venv)
    pip = f"{venv}/bin/pip"
    # Where that fails, the release's own may do.
    run(pip, "install", "--upgrade", "--no-input", f"pip=={stack.pip}" if stack.pip else "pip")
    version = read_version(run(pip, "--version")[1])
    return Pip((pip,), version=version, place=place) if version >= OLDEST else None
