"""``spr-cluster stacks``."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.console.display import make_progress
from cluster.console.options import JsonRequest, argument, option, switch
from cluster.console.output import emit, wrap
from cluster.console.parser import Parser, add_request
from infra.errors import SprError, UsageError
from infra.project_file import find_project_file
from infra.words import counted
from provision.install import stack_digest
from provision.stacks.compatibility import explain_state, training_flags
from provision.stacks.load import load_stack, stack_names
from provision.stacks.lock import Pinned, lock_path, read_lock, render_lock
from provision.stacks.sources import (
    Resolver,
    SourcesReport,
    check_sources,
    describe_target,
    find_resolver,
    without_login,
)
from provision.stacks.stack import Stack


@dataclass(frozen=True, kw_only=True)
class StacksRequest(JsonRequest):
    """Show the shipped stacks and your own: their packages, training flags, and support state.
    Like `up`, it rejects versions that don't match. --check queries every index that a stack
    names, from this machine, and resolves its packages for the nodes; the exit code is 1 if there
    are problems. --lock then writes every package with its exact version and SHA-256 to
    spr-cluster.locks/STACK.txt beside spr-cluster.toml. Nodes and images made from this folder
    install exactly these packages. When the stack changes, its lock is rejected until you write it
    again.

    examples:
      spr-cluster stacks
      spr-cluster stacks --check              is every package available?
      spr-cluster stacks --check intel --lock the same packages on all later nodes
      rm spr-cluster.locks/intel.txt          remove the lock: nodes resolve again

    your own stacks, in spr-cluster.toml in the working folder or above:
      [stacks.mine]
      base = "intel"                          the other keys change this stack
      python_packages = ["datasets==4.1.0"]   replaces that package, or adds it
    """

    names: tuple[str, ...] = argument("stacks (default: all)", (), takes="*", metavar="STACK")
    check: bool = switch("check that all packages are available; installs nothing")
    lock: bool = switch(
        "with --check: pin every package, with hashes, for all later nodes", needs="--check"
    )
    timeout: float = option(
        "with --check: limit for each stack (default: 600)",
        600.0,
        parse=float,
        metavar="SECONDS",
        needs="--check",
    )
    isolated: bool = switch(
        "with --check: ignore this machine's pip configuration, as machines on AWS have none",
        needs="--check",
    )


def add_parser(parent: Parser) -> None:
    add_request(parent, "stacks", run, StacksRequest)


def run(request: StacksRequest) -> int:
    if request.check:
        return run_check(request)
    stacks = [load_stack(name, locked=False) for name in request.names or stack_names()]
    end = "To check that everything is available: spr-cluster stacks --check"
    text = "\n\n".join([*map(render, stacks), end])
    emit(request, text, [describe(stack) for stack in stacks])
    return 0


def describe(stack: Stack) -> dict[str, Any]:
    """Return a stack for ``--json``."""
    lock, problem = _find_lock(stack)
    locked = stack.model_copy(update={"lock": tuple(map(str, lock))})
    return {
        **stack.model_dump(),
        "lock": [*map(str, lock)] if lock else None,
        "lock_problem": problem,
        "digest": stack_digest(locked),
        "training_flags": list(_flags(stack)),
        "state": list(explain_state(stack)),
    }


def _find_lock(stack: Stack) -> tuple[tuple[Pinned, ...], str]:
    """Return a stack's lock, if it is usable, and what is wrong with it, if anything."""
    try:
        return read_lock(stack, find_project_file().parent), ""
    except UsageError as error:
        return (), error.message


def _describe_lock(stack: Stack) -> str:
    lock, problem = _find_lock(stack)
    command = f"spr-cluster stacks --check {stack.name} --lock"
    if problem:
        return f"rejected: {problem} (to update it: {command})"
    if not lock:
        return f"none; to pin all packages by hash: {command}"
    count = counted(len(lock), "package")
    return f"{count} pinned by hash, in {lock_path(stack.name, find_project_file().parent)}"


def _flags(stack: Stack) -> tuple[str, ...]:
    try:
        return training_flags(stack).argv
    except UsageError:
        return ()


def render(stack: Stack) -> str:
    """Return a stack in a few lines."""
    rows = {
        "machine": f"Ubuntu {stack.ubuntu}, Python {stack.python}",
        "packages": ", ".join(stack.python_packages),
        "from": ", ".join((*stack.indexes, *stack.find_links, "PyPI")),
        "system": ", ".join(stack.system_packages),
        "training": f"{stack.launcher}, gradients over {stack.backend}"
        + (", with IPEX" if stack.use_ipex else ""),
        "trainer": " ".join(_flags(stack)),
        "variables": " ".join(f"{name}={value}" for name, value in stack.environment.items()),
        "examples": stack.examples,
        "lock": _describe_lock(stack),
    }
    lines = [f"{stack.name}: {stack.summary}"]
    shown = [(key, text) for key, text in rows.items() if text]
    shown += [("note", sentence) for sentence in explain_state(stack)]
    return "\n".join([*lines, *(wrap(f"  {key:<10}{text}", 12) for key, text in shown)])


def run_check(request: StacksRequest) -> int:
    if not (0 < request.timeout < math.inf):
        raise UsageError(f"--timeout {request.timeout:g}: expected seconds, more than 0")
    names = dict.fromkeys(request.names or stack_names())
    stacks = [load_stack(name, locked=False) for name in names]
    resolver = find_resolver(isolated=request.isolated)
    progress = make_progress()
    done: list[tuple[SourcesReport, Path | None]] = []
    for stack in stacks:
        with progress.phase(f"{'Lock' if request.lock else 'Check'} stack {stack.name}"):
            report = check_sources(
                stack, resolver, progress, limit_s=request.timeout, hashes=request.lock
            )
            has_lock = request.lock and not report.problems
            done.append((report, _write_lock(stack, report) if has_lock else None))
    rows = [
        report.as_dict() | ({"lock": str(path) if path else None} if request.lock else {})
        for report, path in done
    ]
    lines = [render_report(report, path) for report, path in done]
    emit(request, "\n".join([*lines, *render_configuration(resolver)]), rows)
    wrong = [report.stack.name for report, _ in done if report.problems]
    if wrong:
        raise SprError(
            f"{len(wrong)} of {counted(len(done), 'stack')} can't be installed: {', '.join(wrong)}"
        )
    return 0


def _write_lock(stack: Stack, report: SourcesReport) -> Path:
    path = lock_path(stack.name, find_project_file().parent)
    new = path.with_suffix(".new")
    try:
        path.parent.mkdir(exist_ok=True)
        # Atomically: a partial lock would install without some indirect dependencies.
        new.write_text(render_lock(stack, report.packages))
        new.replace(path)
    except OSError as error:
        with suppress(OSError):
            new.unlink()
        raise UsageError(f"{path}: {error.strerror}") from None
    return path


def render_report(report: SourcesReport, lock: Path | None) -> str:
    """Return one line if there are no problems, else a sentence per problem."""
    target = describe_target(report.stack)
    count = counted(len(report.packages), "package")
    if lock:
        return f"{report.stack.name}: wrote {lock}: {count} with hashes, for {target}"
    if not report.problems:
        return f"{report.stack.name}: {count} available and compatible, for {target}"
    problems = (wrap(f"  {problem.sentence}", 4) for problem in report.problems)
    lines = [f"{report.stack.name}:", *problems]
    if any(problem.index for problem in report.problems) and not report.packages:
        lines.append("  The packages were not resolved. Fix the other problems first.")
    return "\n".join(lines)


def render_configuration(resolver: Resolver) -> list[str]:
    """Warn if this machine's pip configuration may lead to another result than on AWS."""
    sources = resolver.configuration.sources
    if not sources.indexes and not sources.find_links:
        return []
    added = ", ".join(map(without_login, sources.indexes + sources.find_links))
    return [
        wrap(
            f"This machine's pip configuration adds {added}, "
            "which machines on AWS do not have. To ignore it: --isolated."
        )
    ]
