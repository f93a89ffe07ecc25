"""``spr-cluster stacks lock``."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from cluster.cli.display import make_progress
from cluster.cli.parser import SubParsers, add_command
from cluster.cli.stacks_check import (
    add_asking_options,
    check_timeout,
    render_report,
    say_configuration,
)
from infra.errors import UsageError
from infra.progress import Progress
from provision.pip import find_pip, hash_wheel
from provision.stack_check import SourcesReport, check_sources
from provision.stacks import Stack, load_stack, stack_names
from provision.stacks.lock import Pinned, lock_path, render_lock

_EXAMPLES = """\
  spr-cluster stacks lock intel --isolated    as a machine on AWS would ask
  spr-cluster stacks lock                     every stack, your own ones included
  rm spr-cluster.locks/intel.txt              the nodes resolve by themselves again
"""


def add_parser(actions: SubParsers) -> None:

    lock = add_command(
        actions,
        "lock",
        "Resolve a stack as `stacks check` does, and write every package with its exact version and\n"
        "SHA-256 to spr-cluster.locks/STACK.txt in the working folder. Nodes and images made from\n"
        "there then have just that, and refuse a file that is another one. A lock is for the stack as\n"
        "it is: once that changes, the lock is refused until it is made anew.",
        _EXAMPLES,
        help_="pin every package of a stack, with hashes, for all later nodes",
    )
    add_asking_options(lock)
    lock.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:

    check_timeout(args)
    names = dict.fromkeys(args.names or stack_names())
    stacks = [load_stack(name, locked=False) for name in names]
    pip = find_pip(isolated=args.isolated)
    progress = make_progress()
    done: list[tuple[SourcesReport, Path | None]] = []
    for stack in stacks:
        end = time.monotonic() + args.timeout
        with progress.phase(f"Lock stack {stack.name}"):
            report = check_sources(stack, pip, progress, limit_s=args.timeout)
            written = None if report.problems else _write(stack, report, progress, end)
            done.append((report, written))
    if args.json:
        print(json.dumps([_describe(report, path) for report, path in done]))
    else:
        told = [_tell(report, path) if path else render_report(report) for report, path in done]
        print("\n".join([*told, *say_configuration(pip)]))
    return 0 if all(path for _, path in done) else 1


def _write(stack: Stack, report: SourcesReport, progress: Progress, end: float) -> Path:

    packages = []
    for wheel in report.wheels:
        if not wheel.sha256:
            progress.note(f"downloading {wheel.name}, whose index gives no hash")
        packages.append(Pinned(wheel.name, wheel.version, (hash_wheel(wheel, end),)))
    path = lock_path(stack.name, Path())
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(render_lock(stack, packages))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    return path


def _describe(report: SourcesReport, path: Path | None) -> dict[str, Any]:
    return {**report.as_dict(), "lock": str(path) if path else None}


def _tell(report: SourcesReport, path: Path) -> str:
    return (
        f"{report.stack}: {path} has {len(report.wheels)} packages with their hashes, for Python "
        f"{report.target.python} on Ubuntu {report.target.ubuntu}"
    )
