"""``spr-cluster stacks``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from cluster.cli import stacks_check, stacks_lock
from cluster.cli.parser import SubParsers, add_command, add_json_option
from cluster.cli.wrapping import wrap
from infra.errors import UsageError
from infra.words import counted
from provision.install import stack_digest
from provision.stacks.compatibility import explain_state, training_flags
from provision.stacks.load import load_stack, stack_names
from provision.stacks.lock import Lock, lock_path, read_lock
from provision.stacks.stack import Stack

_EXAMPLES = """\
  spr-cluster stacks
  spr-cluster stacks check                    are the packages of every stack available?
  spr-cluster stacks check intel --isolated   without this machine's pip configuration
  spr-cluster stacks lock intel --isolated    the same packages, by hash, on all later nodes

your own stacks, in spr-cluster.toml in the working folder:
  [stacks.mine]
  base = "intel"                              the other keys change this stack
  python_packages = ["datasets==4.1.0"]       replaces that package, or adds it
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "stacks",
        "List the shipped stacks and your own: their packages, training flags, and support state.\n"
        "Versions that don't match are rejected here as in `up`.",
        _EXAMPLES,
    )
    add_json_option(parser)
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
        print("\nTo check that everything is available: spr-cluster stacks check")
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
    """A stack's lock, if it is usable, and what is wrong with it, if anything."""
    try:
        return read_lock(stack, Path()), ""
    except UsageError as error:
        return None, error.message


def _describe_lock(stack: Stack) -> str:
    lock, problem = _find_lock(stack)
    command = f"spr-cluster stacks lock {stack.name}"
    if problem:
        return f"rejected: {problem} (to update it: {command})"
    if lock is None:
        return f"none; to pin all packages by hash: {command}"
    count = counted(len(lock.packages), "package")
    return f"{count} pinned by hash, in {lock_path(stack.name, Path())}"


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
        "lock": _describe_lock(stack),
    }
    lines = [f"{stack.name}: {stack.summary}"]
    shown = [(key, text) for key, text in rows.items() if text]
    shown += [("note", sentence) for sentence in explain_state(stack)]
    return "\n".join([*lines, *(wrap(f"  {key:<10}{text}", 12) for key, text in shown)])
