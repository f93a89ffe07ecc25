"""A stack's lock: all its packages with exact versions and hashes, in a file of the working folder.

The file has pip's format (https://pip.pypa.io/en/stable/topics/secure-installs/). Its first lines
record the stack's inputs, so that a lock is rejected after the stack changes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from infra.errors import UsageError
from infra.files import read_text
from provision.stacks.stack import Stack, parse_requirement

LOCK_FOLDER = "spr-cluster.locks"
"""Beside ``spr-cluster.toml``; one file per locked stack."""

_INPUTS = ("ubuntu", "python", "indexes", "find_links", "python_packages", "pip")
_HASH = r"--hash=sha256:[0-9a-f]{64}"
_PIN = re.compile(rf"([a-z0-9][a-z0-9-]*)==([A-Za-z0-9.!+_-]+)((?: {_HASH})+)", re.ASCII)


@dataclass(frozen=True)
class Pinned:
    """One package: its name in PyPI's normal form, its version, and the SHA-256 of each allowed file."""

    name: str
    version: str
    sha256: tuple[str, ...]

    def __str__(self) -> str:
        hashes = "".join(f" --hash=sha256:{digest}" for digest in self.sha256)
        return f"{self.name}=={self.version}{hashes}"


def lock_path(stack: str, folder: Path) -> Path:
    """The path of a stack's lock."""
    return folder / LOCK_FOLDER / f"{stack}.txt"


def requirements(stack: Stack) -> tuple[str, ...]:
    """The packages to resolve together: the stack's, and the pip that installs them."""
    return (*stack.python_packages, *([f"pip=={stack.pip}"] if stack.pip else []))


def render_lock(stack: Stack, packages: Iterable[Pinned]) -> str:
    """Render the file, the same text for the same packages."""
    header = [
        f"# The packages of stack {stack.name} for x86-64, as "
        f"`spr-cluster stacks --check {stack.name} --lock` resolved them from:",
        *_inputs(stack).values(),
    ]
    pins = sorted(packages, key=lambda package: package.name)
    return "\n".join([*header, *map(str, pins), ""])


def _inputs(stack: Stack) -> dict[str, str]:
    """Return the lines with what a stack is resolved from, by key."""
    known = stack.model_dump(include=set(_INPUTS))
    return {key: f"# {key}: {json.dumps(_listed(known[key]))}" for key in _INPUTS}


def _listed(value: str | Iterable[str]) -> list[str]:
    return [value] if value and isinstance(value, str) else sorted(value)


def parse_lock(text: str, where: str) -> tuple[Pinned, ...]:
    """Parse a lock. Raises :class:`UsageError` with the first invalid line."""
    packages = []
    for number, line in enumerate(text.splitlines(), 1):
        if pin := _PIN.fullmatch(line.strip()):
            hashes = tuple(option.rpartition(":")[2] for option in pin[3].split())
            packages.append(Pinned(pin[1], pin[2], hashes))
        elif line.strip() and not line.startswith("#"):
            raise UsageError(
                f"{where}, line {number}: {line[:60]!r} is not a line of a lock, such as "
                "name==1.0 --hash=sha256:…"
            )
    return tuple(packages)


def read_lock(stack: Stack, folder: Path) -> tuple[Pinned, ...]:
    """Read a stack's lock; empty without one.

    Raises :class:`UsageError` if the stack has changed since, or lacks packages in the lock.
    """
    path = lock_path(stack.name, folder)
    if not path.exists():
        return ()
    text = read_text(path)
    packages = parse_lock(text, str(path))
    changed = [key for key, line in _inputs(stack).items() if line not in text.splitlines()]
    versions = {package.name: package.version for package in packages}
    needed = [found for found in map(parse_requirement, requirements(stack)) if found]
    lacks = [r.text for r in needed if r.name not in versions or not r.accepts(versions[r.name])]
    if changed or lacks:
        why = f"the stack has changed since: {', '.join(changed)}"
        raise UsageError(
            f"{path}: {why if changed else 'it lacks ' + ', '.join(lacks)}",
            hint=f"to update it: spr-cluster stacks --check {stack.name} --lock. Without the file, every "
            "node resolves the packages itself",
        )
    return packages
