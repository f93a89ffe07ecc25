"""``spr-cluster stacks``."""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING, Any

from cluster.cli.common import SubParsers, add_command

if TYPE_CHECKING:
    from provision.pip import Pip
    from provision.stack_check import SourcesReport
    from provision.stacks import Stack

_EXAMPLES = """\
  spr-cluster stacks
  spr-cluster stacks check                    every stack: are all its packages to be had?
  spr-cluster stacks check intel --isolated   as a machine on AWS would ask

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
    check.add_argument("names", nargs="*", metavar="STACK", help="stacks (default: all)")
    check.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="end at the latest after this time for each stack (default: 600)",
    )
    check.add_argument(
        "--isolated",
        action="store_true",
        help="leave out this machine's pip configuration, as machines on AWS have none",
    )
    # SUPPRESS: otherwise its absence here would take back a --json before `check`.
    check.add_argument(
        "--json",
        action="store_true",
        default=argparse.SUPPRESS,
        help="print the result as JSON on stdout",
    )
    check.set_defaults(run=run_check)


def run(args: argparse.Namespace) -> int:
    from provision.stacks import load_stack, stack_names

    stacks = [load_stack(name) for name in stack_names()]
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

    return {
        **stack.model_dump(),
        "digest": stack_digest(stack),
        "training_flags": list(_flags(stack)),
        "state": list(explain_state(stack)),
    }


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
    }
    lines = [f"{stack.name}: {stack.summary}"]
    lines += [f"  {key:<10}{text}" for key, text in rows.items() if text]
    lines += [f"  note      {sentence}" for sentence in explain_state(stack)]
    return "\n".join(lines)


def run_check(args: argparse.Namespace) -> int:
    from cluster.cli.display import make_progress
    from infra.errors import UsageError
    from provision.pip import find_pip
    from provision.stack_check import check_sources
    from provision.stacks import load_stack, stack_names

    if not (0 < args.timeout < math.inf):
        raise UsageError(f"--timeout {args.timeout:g}: expected seconds, more than 0")
    stacks = [load_stack(name) for name in dict.fromkeys(args.names or stack_names())]
    pip = find_pip(isolated=args.isolated)
    progress = make_progress()
    reports = []
    for stack in stacks:
        with progress.phase(f"Check stack {stack.name}"):
            reports.append(check_sources(stack, pip, progress, limit_s=args.timeout))
    if args.json:
        print(json.dumps([report.as_dict() for report in reports]))
    else:
        print("\n".join([*map(render_report, reports), *_say_configuration(pip)]))
    return 1 if any(report.problems for report in reports) else 0


def render_report(report: SourcesReport) -> str:
    """One line where all is well, else a sentence per problem."""
    if not report.problems:
        return (
            f"{report.stack}: all there; {len(report.resolved)} packages fit together for Python "
            f"{report.target.python} on Ubuntu {report.target.ubuntu}"
        )
    lines = [f"{report.stack}:", *(f"  {problem.sentence}" for problem in report.problems)]
    if not report.resolved:
        lines.append("  Whether the packages fit together is not known until that is mended.")
    return "\n".join(lines)


def _say_configuration(pip: Pip) -> list[str]:
    more = pip.configured_sources()
    if not more:
        return []
    return [
        f"This machine's pip configuration adds {', '.join(more)}, which machines on AWS do not "
        "have; --isolated leaves it out."
    ]
