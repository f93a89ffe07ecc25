"""``spr-cluster stacks check``."""

from __future__ import annotations

import argparse
import json
import math

from cluster.cli.display import make_progress
from cluster.cli.parser import SubParsers, add_command
from cluster.cli.wrapping import wrap
from infra.errors import UsageError
from provision.pip import Pip, find_pip
from provision.stack_check import SourcesReport, check_sources
from provision.stacks import load_stack, stack_names

_EXAMPLES = """\
  spr-cluster stacks check
  spr-cluster stacks check intel reference --json
  spr-cluster stacks check upstream --timeout 60
"""


def add_parser(actions: SubParsers) -> None:
    check = add_command(
        actions,
        "check",
        "Ask every index that a stack names, look for each of its packages as the node's Python and\n"
        "Ubuntu would, and let pip resolve them together without installing. It asks from this\n"
        "machine, about Python packages; Ubuntu's own packages are not asked for. Exit code 1\n"
        "with a sentence per problem.",
        _EXAMPLES,
        help_="ask every index and for every package; installs nothing",
    )
    add_asking_options(check)
    check.set_defaults(run=run)


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


def check_timeout(args: argparse.Namespace) -> None:
    """Raises :class:`UsageError` for a time that is none."""

    if not (0 < args.timeout < math.inf):
        raise UsageError(f"--timeout {args.timeout:g}: expected seconds, more than 0")


def run(args: argparse.Namespace) -> int:

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
