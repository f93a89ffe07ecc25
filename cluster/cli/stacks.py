"""``spr-cluster stacks``."""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING, Any

from cluster.cli import stacks_lock
from cluster.cli.common import SubParsers, add_command
from cluster.cli.display import wrap

if TYPE_CHECKING:
    from provision.pip import Pip
    from provision.stack_check import SourcesReport
    from provision.stacks import Stack
    from provision.stacks.lock import Lock

_EXAMPLES = """\
  spr-cluster stacks
  spr-cluster stacks check                    every stack: are all its packages to be had?
  spr-cluster stacks check intel --isolated   as a machine on AWS would ask
  spr-cluster stacks lock intel --isolated    the same packages, by their hashes, on all later nodes

your own, in spr-cluster.toml of the working folder:
  [stacks.mine]
  base = "intel"                              every other key changes what this one has
  python_packages = ["datasets==4.1.0"]       takes the place of that package, or is added
"""
_CHECK_EXAMPLES = """\
  spr-cluster stacks check
  spr-cluster stacks check intel reference --json
  spr-cluster stacks check upstream --timeout 60
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "stacks",
        "list and explain the software stacks, and check that they can be had",
        "List the stacks that ship and your own: what is in them, what they train with, and the\n"
        "state of their parts. Versions that don't match are refused here as in `up`.",
        _EXAMPLES,
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON on stdout")
    parser.set_defaults(run=run)
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    check = add_command(
        actions,
        "check",
        "ask every index and for every package; installs nothing",
        "Ask every index that a stack names, look for each of its packages as the node's Python and\n"
        "Ubuntu would, and let pip resolve them together without installing. It asks from this\n"
        "machine, about Python packages; Ubuntu's own packages are not asked for. Exit code 1\n"
        "with a sentence per problem.",
        _CHECK_EXAMPLES,
    )
    add_asking_options(check)
    check.set_defaults(run=run_check)
    stacks_lock.add_parser(actions)


def add_asking_options(parser: argparse.ArgumentParser) -> None:
    """Which stacks to ask about, and how; ``--json``."""
    parser.add_argument("names", nargs="*", metavar="STACK", help="stacks (default: all)")
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="end at the latest after this time for each stack (default: 600)",
    )
    parser.add_argument(
        "--isolated",
        action="store_true",
        help="leave out this machine's pip configuration, as machines on AWS have none",
    )
    # SUPPRESS: otherwise its absence here would take back a --json before `check`.
    parser.add_argument(
        "--json",
        action="store_true",
        default=argparse.SUPPRESS,
        help="print the result as JSON on stdout",
    )


def run(args: argparse.Namespace) -> int:
    from provision.stacks import load_stack, stack_names

    stacks = [load_stack(name, locked=False) for name in stack_names()]
    if args.json:
        print(json.dumps([describe(stack) for stack in stacks]))
    else:
        print("\n\n".join(render(stack) for stack in stacks))
        print("\nTo see whether all of it can be had: spr-cluster stacks check")
    return 0


def describe(stack: Stack) -> dict[str, Any]:
    """A stack for ``--json``."""
    from provision.install import stack_digest
    from provision.stacks.state import explain_state

    lock, problem = _find_lock(stack)
    locked = stack.model_copy(update={"lock": lock.lines}) if lock else stack
    return {
        **stack.model_dump(),
        "lock": [str(package) for package in lock.packages] if lock else None,
        "lock_problem": problem,
        "digest": stack_digest(locked),
        "training_flags": list(_flags(stack)),
        "state": list(explain_state(stack)),
    }


def _find_lock(stack: Stack) -> tuple[Lock | None, str]:
    """Its lock, if it has one of use, and what is wrong with it, if anything."""
    from pathlib import Path

    from infra.errors import UsageError
    from provision.stacks.lock import read_lock

    try:
        return read_lock(stack, Path()), ""
    except UsageError as error:
        return None, error.message


def _tell_lock(stack: Stack) -> str:
    from pathlib import Path

    from provision.stacks.lock import lock_path

    lock, problem = _find_lock(stack)
    make = f"spr-cluster stacks lock {stack.name}"
    if problem:
        return f"refused: {problem} ({make} makes it anew)"
    if lock is None:
        return f"none: {make} pins all packages by their hashes"
    return f"{len(lock.packages)} packages by their hashes, in {lock_path(stack.name, Path())}"


def _flags(stack: Stack) -> tuple[str, ...]:
    from infra.errors import UsageError
    from provision.stacks.flags import training_flags

    try:
        return training_flags(stack).argv
    except UsageError:
        return ()


def render(stack: Stack) -> str:
    """A stack in a few lines."""
    from provision.stacks.state import explain_state

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
        "lock": _tell_lock(stack),
    }
    lines = [f"{stack.name}: {stack.summary}"]
    told = [(key, text) for key, text in rows.items() if text]
    told += [("note", sentence) for sentence in explain_state(stack)]
    return "\n".join([*lines, *(wrap(f"  {key:<10}{text}", 12) for key, text in told)])


def check_timeout(args: argparse.Namespace) -> None:
    """Raises :class:`UsageError` for a time that is none."""
    from infra.errors import UsageError

    if not (0 < args.timeout < math.inf):
        raise UsageError(f"--timeout {args.timeout:g}: expected seconds, more than 0")


def run_check(args: argparse.Namespace) -> int:
    from cluster.cli.display import make_progress
    from provision.pip import find_pip
    from provision.stack_check import check_sources
    from provision.stacks import load_stack, stack_names

    check_timeout(args)
    stacks = [load_stack(name, locked=False) for name in dict.fromkeys(args.names or stack_names())]
    pip = find_pip(isolated=args.isolated)
    progress = make_progress()
    reports = []
    for stack in stacks:
        with progress.phase(f"Check stack {stack.name}"):
            reports.append(check_sources(stack, pip, progress, limit_s=args.timeout))
    if args.json:
        print(json.dumps([report.as_dict() for report in reports]))
    else:
        print("\n".join([*map(render_report, reports), *say_configuration(pip)]))
    return 1 if any(report.problems for report in reports) else 0


def render_report(report: SourcesReport) -> str:
    """One line where all is well, else a sentence per problem."""
    if not report.problems:
        return (
            f"{report.stack}: all there; {len(report.resolved)} packages fit together for Python "
            f"{report.target.python} on Ubuntu {report.target.ubuntu}"
        )
    told = (wrap(f"  {problem.sentence}", 4) for problem in report.problems)
    lines = [f"{report.stack}:", *told]
    if not report.resolved:
        lines.append("  Whether the packages fit together is not known until that is mended.")
    return "\n".join(lines)


def say_configuration(pip: Pip) -> list[str]:
    """That what was found may not be what machines on AWS find, where that is so."""
    more = pip.configured_sources()
    if not more:
        return []
    return [
        wrap(
            f"This machine's pip configuration adds {', '.join(more)}, which machines on AWS do not "
            "have; --isolated leaves it out."
        )
    ]
