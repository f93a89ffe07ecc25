"""The user's own stacks: ``[stacks.NAME]`` in ``spr-cluster.toml``, each a change of one that ships."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError

from infra.errors import UsageError
from infra.ubuntu import Release
from infra.validation import explain_invalid, nearest
from provision.stacks.matrix import UBUNTU_PYTHON
from provision.stacks.stack import Stack
from provision.stacks.versions import parse_requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OWN_FILE = "spr-cluster.toml"
_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")
_Url = Annotated[str, Field(pattern=r"^(https?|file)://\S+$")]
# https://www.debian.org/doc/debian-policy/ch-controlfields.html#source
_SystemPackage = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9+.-]+$")]
_Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
_EXPECTED = {
    "base": "the name of a stack that ships",
    "summary": "a line of text",
    "ubuntu": f"one of {', '.join(UBUNTU_PYTHON)}, in quotes",
    "python": f"one of {', '.join(UBUNTU_PYTHON.values())}, in quotes",
    "backend": "ccl or gloo",
    "use_ipex": "true or false",
    "indexes": "a list of addresses that begin with https://",
    "find_links": "a list of addresses that begin with https://",
    "system_packages": "a list of names of Ubuntu packages",
    "python_packages": 'a list of requirements such as "torch==2.7.0"',
    "remove_packages": "a list of names of Python packages",
    "pip": "a version such as 25.0.1",
    "environment": "variables with their values in quotes",
    "examples": "the address of a source archive of transformers, .tar.gz",
}


class Changes(BaseModel):
    """What an own stack has otherwise than its base; ``None`` leaves it as it is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: str
    summary: str | None = None
    ubuntu: Release | None = None
    python: str | None = Field(default=None, pattern=r"^3\.[0-9]{1,2}$")
    backend: Literal["ccl", "gloo"] | None = None
    use_ipex: StrictBool | None = None
    indexes: tuple[_Url, ...] | None = None
    find_links: tuple[_Url, ...] | None = None
    system_packages: tuple[_SystemPackage, ...] | None = None
    python_packages: tuple[str, ...] = ()
    """Each takes the place of the base's requirement of that package, or is added."""
    remove_packages: tuple[str, ...] = ()
    pip: str | None = Field(default=None, pattern=r"^[0-9]+(\.[0-9]+)*$")
    examples: _Url | None = None
    environment: dict[_Variable, str] = {}
    """Added to the base's; an empty value takes a variable away."""


def read_own_stacks(path: Path, shipped: Sequence[str]) -> dict[str, Changes]:
    """The own stacks in a file; none where there is no file.

    Raises :class:`UsageError` naming the key, its value, what was expected and the nearest name.
    """
    try:
        content = tomllib.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}", hint="it must be a TOML file") from None
    for key in content:
        if key != "stacks":
            raise UsageError(
                f"{path}: [{key}] is not read by this tool{nearest(key, ['stacks'])}",
                hint="it holds [stacks.NAME] and nothing else",
            )
    tables = content.get("stacks", {})
    if not isinstance(tables, dict):
        raise UsageError(f"{path}: stacks is no table", hint="write [stacks.NAME]")
    return {name: _read_one(path, name, table, shipped) for name, table in tables.items()}


def _read_one(path: Path, name: str, table: Any, shipped: Sequence[str]) -> Changes:
    where = f"{path}: [stacks.{name}]"
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{where}: a name is of lower-case letters, digits and hyphens, at most 32"
        )
    if name in shipped:
        raise UsageError(
            f"{where}: a stack of that name ships with this tool",
            hint=f'give yours another name, and base = "{name}"',
        )
    if not isinstance(table, dict):
        raise UsageError(f"{where}: write it as a table of its own")
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
    for text in changes.python_packages:
        if not parse_requirement(text):
            expected = _EXPECTED["python_packages"]
            raise UsageError(f"{where}: python_packages: {text!r}: expected {expected}")
    return changes


def apply_changes(name: str, base: Stack, changes: Changes) -> Stack:
    """The base with the changes. Raises :class:`UsageError` where one takes away what isn't there."""
    given = changes.model_dump(
        exclude_none=True,
        exclude={"base", "python_packages", "remove_packages", "environment"},
    )
    if changes.ubuntu and not changes.python:
        given["python"] = UBUNTU_PYTHON[changes.ubuntu]
    given.setdefault("summary", f"{base.name}, changed in {OWN_FILE}")
    environment = {**base.environment, **changes.environment}
    return Stack(
        **{
            **base.model_dump(),
            **given,
            "name": name,
            "python_packages": _merge(name, base.python_packages, changes),
            "environment": {key: value for key, value in environment.items() if value},
        }
    )


def _merge(name: str, packages: Sequence[str], changes: Changes) -> tuple[str, ...]:
    by_name = {_package(text): text for text in packages}
    for text in changes.remove_packages:
        if by_name.pop(_package(text), None) is None:
            raise UsageError(
                f"stack {name}: remove_packages: {text!r} is not in its base"
                f"{nearest(text, by_name)}"
            )
    by_name |= {_package(text): text for text in changes.python_packages}
    return tuple(by_name.values())


def _package(text: str) -> str:
    found = parse_requirement(text)
    return found.name if found else text
