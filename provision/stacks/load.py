"""Load a stack by name: the TOML files in this folder, and the user's own in ``spr-cluster.toml``.

Each ``[stacks.NAME]`` of the user changes a shipped stack; ``spr-cluster.locks`` pins the packages of any.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError

from infra.ec2.images import Release
from infra.errors import UsageError
from infra.files import parse_toml
from infra.project_file import PROJECT_FILE, find_project_file, read_project_file
from infra.words import explain_invalid, nearest
from provision.stacks.compatibility import UBUNTU_PYTHON, check_stack
from provision.stacks.lock import read_lock
from provision.stacks.stack import TRANSFORMERS, Stack, parse_requirement

DEFAULT_STACK = "upstream"
"""docs/software.md explains the choice."""
_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")
_Url = Annotated[str, Field(pattern=r"^(https?|file)://\S+$")]
# https://www.debian.org/doc/debian-policy/ch-controlfields.html#source
_SystemPackage = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9+.-]+$")]
_Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
_EXPECTED = {
    "base": "the name of a shipped stack",
    "summary": "a line of text",
    "ubuntu": f"one of {', '.join(UBUNTU_PYTHON)}, in quotes",
    "python": f"one of {', '.join(UBUNTU_PYTHON.values())}, in quotes",
    "backend": "ccl or gloo",
    "use_ipex": "true or false",
    "indexes": "a list of URLs that begin with https://",
    "find_links": "a list of URLs that begin with https://",
    "system_packages": "a list of Ubuntu package names",
    "python_packages": 'a list of requirements such as "torch==2.7.0"',
    "remove_packages": "a list of Python package names",
    "pip": "a version such as 25.0.1",
    "environment": "variables, with their values in quotes",
    "examples": "the URL of a source archive of transformers, .tar.gz",
}


class Changes(BaseModel):
    """The changes to the base; ``None`` keeps its value."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: str
    summary: str | None = None
    ubuntu: Release | None = None
    python: str | None = Field(default=None, pattern=r"^3\.[0-9]{1,2}$")
    backend: Literal["ccl", "gloo"] | None = None
    use_ipex: StrictBool | None = None
    indexes: tuple[_Url, ...] | None = None
    find_links: tuple[_Url, ...] | None = None
    system_packages: tuple[_SystemPackage, ...] = ()
    """Added to those of the base, which every installation needs."""
    python_packages: tuple[str, ...] = ()
    """Each replaces the base's requirement of the same package, or is added."""
    remove_packages: tuple[str, ...] = ()
    pip: str | None = Field(default=None, pattern=r"^[0-9]+(\.[0-9]+)*$")
    examples: _Url | None = None
    environment: dict[_Variable, str] = {}
    """Added to the base's; an empty value removes a variable."""


def read_own_stacks(path: Path, shipped: Sequence[str]) -> dict[str, Changes]:
    """Read the stacks in a file; none if there is no file.

    Raises :class:`UsageError` with the key, its value, what was expected, and the closest valid name.
    """
    tables = read_project_file(path).table("stacks")
    return {name: _read_one(path, name, table, shipped) for name, table in tables.items()}


def _read_one(path: Path, name: str, table: Any, shipped: Sequence[str]) -> Changes:
    where = f"{path}: [stacks.{name}]"
    if not _NAME.fullmatch(name):
        raise UsageError(f"{where}: a name has at most 32 lower-case letters, digits, and hyphens")
    if name in shipped:
        raise UsageError(
            f"{where}: a shipped stack has this name",
            hint=f'use another name, with base = "{name}"',
        )
    if not isinstance(table, dict):
        raise UsageError(f"{where}: expected a table")
    try:
        changes = Changes(**table)
    except ValidationError as error:
        raise UsageError(
            f"{where}: {explain_invalid(error, Changes, expected=_EXPECTED)}"
        ) from None
    if changes.base not in shipped:
        raise UsageError(
            f"{where}: base = {changes.base!r}: expected one of {', '.join(shipped)}"
            f"{nearest(changes.base, shipped)}"
        )
    return changes


def apply_changes(name: str, base: Stack, changes: Changes) -> Stack:
    """Return the base with the changes. Raises :class:`UsageError` if one removes a missing package."""
    lists = {"system_packages", "python_packages", "remove_packages", "environment"}
    given = changes.model_dump(exclude_none=True, exclude={"base", *lists})
    if changes.ubuntu and not changes.python:
        given["python"] = UBUNTU_PYTHON[changes.ubuntu]
    given.setdefault("summary", f"{base.name}, changed in {PROJECT_FILE}")
    environment = {**base.environment, **changes.environment}
    stack = Stack(
        **{
            **base.model_dump(),
            **given,
            "name": name,
            "system_packages": tuple(
                dict.fromkeys((*base.system_packages, *changes.system_packages))
            ),
            "python_packages": _merge(name, base.python_packages, changes),
            "environment": {key: value for key, value in environment.items() if value},
        }
    )
    before, now = base.pin(TRANSFORMERS), stack.pin(TRANSFORMERS)
    if changes.examples is not None or not (before and now):
        return stack
    # Script and library have to be of the same release.
    return stack.model_copy(update={"examples": base.examples.replace(before, now)})


def _merge(name: str, packages: Sequence[str], changes: Changes) -> tuple[str, ...]:
    by_name = {_package(text): text for text in packages}
    for text in changes.remove_packages:
        if by_name.pop(_package(text), None) is None:
            raise UsageError(
                f"stack {name}: remove_packages: {text!r} is not in its base"
                f"{nearest(text, list(by_name))}"
            )
    by_name |= {_package(text): text for text in changes.python_packages}
    return tuple(by_name.values())


def _package(text: str) -> str:
    found = parse_requirement(text)
    return found.name if found else text


@cache
def shipped_names() -> tuple[str, ...]:
    """The stacks that ship with the tool."""
    files = resources.files("provision.stacks").iterdir()
    return tuple(sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml")))


def stack_names() -> tuple[str, ...]:
    """The shipped stacks, then the user's own."""
    return (*shipped_names(), *sorted(read_own_stacks(find_project_file(), shipped_names())))


def load_stack(name: str, *, locked: bool = True) -> Stack:
    """Return a stack by its name, checked, with its lock if it has one.

    Raises :class:`UsageError` if the name is unknown, if versions don't match, or, if ``locked``,
    if the stack has changed since it was locked.
    """
    own, shipped = find_project_file(), shipped_names()
    changes = {} if name in shipped else read_own_stacks(own, shipped)
    if name in shipped:
        stack = _load_shipped(name)
    elif name in changes:
        stack = apply_changes(name, _load_shipped(changes[name].base), changes[name])
    else:
        names = (*shipped, *sorted(changes))
        raise UsageError(
            f"unknown stack {name!r}: one of {', '.join(names)}{nearest(name, names)}",
            hint=f"your own stacks are read from {PROJECT_FILE} in the working folder or above",
        )
    check_stack(stack)
    lock = read_lock(stack, own.parent) if locked else ()
    return stack.model_copy(update={"lock": tuple(map(str, lock))})


@cache
def _load_shipped(name: str) -> Stack:
    text = resources.files("provision.stacks").joinpath(f"{name}.toml").read_text()
    return Stack(name=name, **parse_toml(text, name))
