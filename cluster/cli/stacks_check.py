"""``spr-cluster stacks check``."""

from __future__ import annotations

import argparse
import json
import math

from cluster.cli.display import make_progress
from cluster.cli.parser import SubParsers, add_command
from cluster.cli.wrapping import wrap
from infra.errors import SprError, UsageError
from infra.words import counted
from provision.stacks.load import load_stack, stack_names
from provision.stacks.sources import Resolver, SourcesReport, check_sources, find_resolver
from provision.stacks.stack import Stack

_EXAMPLES = """\
  spr-cluster stacks check
  spr-cluster stacks check intel reference --json
  spr-cluster stacks check upstream --timeout 60
"""


def add_parser(actions: SubParsers) -> None:
    check = add_command(
        actions,
        "check",
        "Query every index that a stack names and resolve its Python packages together, for the\n"
        "node's Python and Ubuntu, without installing them. The queries come from this machine.\n"
        "Ubuntu's own packages are not checked. Exit code 1 if there are problems.",
        _EXAMPLES,
        help_="check that all packages are available; installs nothing",
    )
    add_resolver_options(check)
    check.set_defaults(run=run)


def add_resolver_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `check` and `lock` have in common."""
    parser.add_argument("names", nargs="*", metavar="STACK", help="stacks (default: all)")
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="limit for each stack (default: 600)",
    )
    parser.add_argument(
        "--isolated",
        action="store_true",
        help="ignore this machine's pip configuration, as machines on AWS have none",
    )
    # SUPPRESS: otherwise its absence here would take back a --json before `check`.
    parser.add_argument(
        "--json",
        action="store_true",
        default=argparse.SUPPRESS,
        help="print the result as JSON on stdout",
    )


def load_named_stacks(args: argparse.Namespace) -> list[Stack]:
    """Load the stacks on the command line, or all. Raises :class:`UsageError`."""
    if not (0 < args.timeout < math.inf):
        raise UsageError(f"--timeout {args.timeout:g}: expected seconds, more than 0")
    return [load_stack(name, locked=False) for name in dict.fromkeys(args.names or stack_names())]


def run(args: argparse.Namespace) -> int:
    stacks = load_named_stacks(args)
    resolver = find_resolver(isolated=args.isolated)
    progress = make_progress()
    reports = []
    for stack in stacks:
        with progress.phase(f"Check stack {stack.name}"):
            reports.append(check_sources(stack, resolver, progress, limit_s=args.timeout))
    if args.json:
        print(json.dumps([report.as_dict() for report in reports]))
    else:
        print("\n".join([*map(render_report, reports), *render_configuration(resolver)]))
    wrong = [report.stack for report in reports if report.problems]
    if wrong:
        raise SprError(
            f"{len(wrong)} of {counted(len(reports), 'stack')} can't be installed: {', '.join(wrong)}"
        )
    return 0


def render_report(report: SourcesReport) -> str:
    """One line if there are no problems, else a sentence per problem."""
    if not report.problems:
        count = counted(len(report.packages), "package")
        return f"{report.stack}: {count} available and compatible, for {report.target}"
    problems = (wrap(f"  {problem.sentence}", 4) for problem in report.problems)
    lines = [f"{report.stack}:", *problems]
    if any(problem.index for problem in report.problems) and not report.packages:
        lines.append("  The packages were not resolved. Fix the other problems first.")
    return "\n".join(lines)


def render_configuration(resolver: Resolver) -> list[str]:
    """A warning if the result may differ from what machines on AWS find."""
    sources = resolver.configuration.sources
    if not sources.indexes and not sources.find_links:
        return []
    return [
        wrap(
            f"This machine's pip configuration adds {', '.join(sources.indexes + sources.find_links)}, "
            "which machines on AWS do not have. To ignore it: --isolated."
        )
    ]
