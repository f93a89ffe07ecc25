"""``spr-cluster stacks lock``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from cluster.cli.display import make_progress
from cluster.cli.parser import SubParsers, add_command
from cluster.cli.stacks_check import (
    add_resolver_options,
    load_named_stacks,
    render_configuration,
    render_report,
)
from infra.errors import UsageError
from infra.words import counted
from provision.stacks.lock import lock_path, render_lock
from provision.stacks.sources import SourcesReport, check_sources, find_resolver
from provision.stacks.stack import Stack

_EXAMPLES = """\
  spr-cluster stacks lock intel --isolated    without this machine's pip configuration
  spr-cluster stacks lock                     every stack, including your own
  rm spr-cluster.locks/intel.txt              remove the lock: nodes resolve again
"""


def add_parser(actions: SubParsers) -> None:
    lock = add_command(
        actions,
        "lock",
        "Resolve a stack as `stacks check` does, and write every package with its exact version and\n"
        "SHA-256 to spr-cluster.locks/STACK.txt in the working folder. Nodes and images made from\n"
        "this folder then install exactly these packages and reject any other file. When the stack\n"
        "changes, its lock is rejected until you run this command again.",
        _EXAMPLES,
        help_="pin every package of a stack, with hashes, for all later nodes",
    )
    add_resolver_options(lock)
    lock.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    stacks = load_named_stacks(args)
    resolver = find_resolver(isolated=args.isolated)
    progress = make_progress()
    done: list[tuple[SourcesReport, Path | None]] = []
    for stack in stacks:
        with progress.phase(f"Lock stack {stack.name}"):
            report = check_sources(stack, resolver, progress, limit_s=args.timeout, hashes=True)
            done.append((report, None if report.problems else _write(stack, report)))
    if args.json:
        print(json.dumps([_describe(report, path) for report, path in done]))
    else:
        lines = [_render(report, path) if path else render_report(report) for report, path in done]
        print("\n".join([*lines, *render_configuration(resolver)]))
    return 0 if all(path for _, path in done) else 1


def _write(stack: Stack, report: SourcesReport) -> Path:
    path = lock_path(stack.name, Path())
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(render_lock(stack, report.packages))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    return path


def _describe(report: SourcesReport, path: Path | None) -> dict[str, Any]:
    return {**report.as_dict(), "lock": str(path) if path else None}


def _render(report: SourcesReport, path: Path) -> str:
    count = counted(len(report.packages), "package")
    return f"{report.stack}: wrote {path}: {count} with hashes, for {report.target}"
