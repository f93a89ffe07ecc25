"""Load a stack by name: the TOML files in this folder, and the user's own in ``spr-cluster.toml``.

Each of the user's stacks changes a shipped one; ``spr-cluster.locks`` pins the packages of any stack.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from infra.errors import UsageError
from infra.files import parse_toml
from infra.words import nearest
from provision.stacks.compatibility import check_stack
from provision.stacks.lock import read_lock
from provision.stacks.stack import Stack
from provision.stacks.user_stacks import OWN_FILE, apply_changes, read_own_stacks

DEFAULT_STACK = "upstream"
"""Why this one: docs/software.md."""


def shipped_names() -> tuple[str, ...]:
    """The stacks that ship with the tool."""
    files = resources.files("provision.stacks").iterdir()
    return tuple(sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml")))


def stack_names(own: Path = Path(OWN_FILE)) -> tuple[str, ...]:
    """The stacks that ship, then the user's own."""
    return (*shipped_names(), *sorted(read_own_stacks(own, shipped_names())))


def load_stack(name: str, own: Path = Path(OWN_FILE), *, locked: bool = True) -> Stack:
    """Return a stack by its name, checked, with its lock if it has one.

    Raises :class:`UsageError` if the name is unknown, if versions don't match, or, if ``locked``,
    if the stack has changed since it was locked.
    """
    shipped = shipped_names()
    changes = {} if name in shipped else read_own_stacks(own, shipped)
    if name in shipped:
        stack = _load_shipped(name)
    elif name in changes:
        stack = apply_changes(name, _load_shipped(changes[name].base), changes[name])
    else:
        names = (*shipped, *sorted(changes))
        raise UsageError(
            f"unknown stack {name!r}: one of {', '.join(names)}{nearest(name, names)}",
            hint=f"your own stacks are read from {OWN_FILE} in the working folder",
        )
    check_stack(stack)
    lock = read_lock(stack, own.parent) if locked else None
    return stack.model_copy(update={"lock": lock.lines}) if lock else stack


def _load_shipped(name: str) -> Stack:
    text = resources.files("provision.stacks").joinpath(f"{name}.toml").read_text()
    return Stack(name=name, **parse_toml(text, name))
