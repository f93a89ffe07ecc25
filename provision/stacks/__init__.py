"""Stacks as data: each file beside this one names what a node's software is made of.

``spr-cluster.toml`` in the working folder adds own ones, each of which changes one of these;
``spr-cluster.locks`` beside it pins the packages of any of them.
"""

from __future__ import annotations

import difflib
import sys
from importlib import resources
from pathlib import Path

from infra.errors import UsageError
from provision.stacks.lock import read_lock
from provision.stacks.matrix import check_stack
from provision.stacks.own import OWN_FILE, apply_changes, read_own_stacks
from provision.stacks.stack import Stack

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["OWN_FILE", "Stack", "load_stack", "shipped_names", "stack_names"]


def shipped_names() -> tuple[str, ...]:
    """The stacks that ship with the tool."""
    files = resources.files(__name__).iterdir()
    return tuple(sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml")))


def stack_names(own: Path = Path(OWN_FILE)) -> tuple[str, ...]:
    """The stacks that ship, then those of a file."""
    return (*shipped_names(), *sorted(read_own_stacks(own, shipped_names())))


def load_stack(name: str, own: Path = Path(OWN_FILE), *, locked: bool = True) -> Stack:
    """A stack by its name, its versions checked against one another, with its lock where it has one.

    Raises :class:`UsageError` where there is none, where its parts don't fit together, or, if
    ``locked``, where its lock is not of the stack as it is now.
    """
    changes = {} if name in shipped_names() else read_own_stacks(own, shipped_names())
    if name in shipped_names():
        stack = _load_shipped(name)
    elif name in changes:
        stack = apply_changes(name, _load_shipped(changes[name].base), changes[name])
    else:
        names = (*shipped_names(), *sorted(changes))
        near = difflib.get_close_matches(name, names, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise UsageError(
            f"unknown stack {name!r}: one of {', '.join(names)}",
            hint=f"{meant}your own stacks are read from {OWN_FILE} in the working folder",
        )
    check_stack(stack)
    lock = read_lock(stack, own.parent) if locked else None
    return stack.model_copy(update={"lock": lock.lines}) if lock else stack


def _load_shipped(name: str) -> Stack:
    text = resources.files(__name__).joinpath(f"{name}.toml").read_text()
    return Stack(name=name, **tomllib.loads(text))
