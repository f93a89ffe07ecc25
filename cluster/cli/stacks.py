"""``spr-cluster stacks``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from cluster.cli import stacks_check, stacks_lock
from cluster.cli.parser import SubParsers, add_command
from cluster.cli.wrapping import wrap
from infra.errors import UsageError
from provision.install import stack_digest
from provision.stacks import Stack, load_stack, stack_names
from provision.stacks.flags import training_flags
from provision.stacks.lock import Lock, lock_path, read_lock
from provision.stacks.state import explain_state

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


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "stacks",
        "List the stacks that ship and your own: what is in them, what they train with, and the\n"
        "state of their parts. Versions that don't match are refused here as in `up`.",
        _EXAMPLES,
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON on stdout")
    parser.set_defaults(run=run)
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    stacks_check.add_parser(actions)
    stacks_lock.add_parser(actions)


def run(args: argparse.Namespace) -> int:

    stacks = [load_stack(name, locked=False) for name in stack_names()]
    if args.json:
        print(json.dumps([describe(stack) for stack in stacks]))
    else:
        print("\n\n".join(render(stack) for stack in stacks))
        print("\nTo see whether all of it can be had: spr-cluster stacks check")
    return 0


def describe(stack: Stack) -> dict[str, Any]:
    """A stack for ``--json``."""

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

    try:
        return read_lock(stack, Path()), ""
    except UsageError as error:
        return None, error.message


def _tell_lock(stack: Stack) -> str:

    lock, problem = _find_lock(stack)
    make = f"spr-cluster stacks lock {stack.name}"
    if problem:
        return f"refused: {problem} ({make} makes it anew)"
    if lock is None:
        return f"none: {make} pins all packages by their hashes"
    return f"{len(lock.packages)} packages by their hashes, in {lock_path(stack.name, Path())}"


def _flags(stack: Stack) -> tuple[str, ...]:

    try:
        return training_flags(stack).argv
    except UsageError:
        return ()


def render(stack: Stack) -> str:
    """A stack in a few lines."""

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
