"""``spr-cluster.toml``: a project's options for its cluster, its jobs, and its own stacks.

The file is searched for upward from the working folder, as ruff and uv do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from infra.errors import UsageError
from infra.files import parse_toml, read_text
from infra.words import nearest

PROJECT_FILE = "spr-cluster.toml"
TABLES = ("cluster", "jobs", "stacks")
_PART = r"""[A-Za-z0-9_-]+|"[^"]*"|'[^']*'"""
_DOTTED = rf"(?:{_PART})(?:\s*\.\s*(?:{_PART}))*"
_HEADER = re.compile(rf"\s*\[\s*({_DOTTED})\s*\]\s*(?:#.*)?")
_KEY = re.compile(rf"\s*({_DOTTED})\s*=")


@dataclass(frozen=True)
class ProjectFile:
    """The file's content. ``path`` is relative if the file is in the working folder."""

    path: Path = Path(PROJECT_FILE)
    content: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""

    @property
    def root(self) -> Path:
        """The project's folder, absolute."""
        return self.path.absolute().parent

    def table(self, *keys: str) -> dict[str, Any]:
        """Return a table; an empty one if it is not there. Raises :class:`UsageError` for another value."""
        found: Any = self.content
        for depth, key in enumerate(keys, start=1):
            found = found.get(key, {})
            if not isinstance(found, dict):
                name = ".".join(keys[:depth])
                where = self.where(*keys[:depth])
                raise UsageError(f"{where}: {name} is not a table", hint=f"write [{name}]")
        return dict(found)

    def where(self, *keys: str) -> str:
        """Return the file and the line of a key, such as ``spr-cluster.toml:3``."""
        line = next(
            (self._lines[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in self._lines), 0
        )
        return f"{self.path}:{line}" if line else str(self.path)

    @cached_property
    def _lines(self) -> dict[tuple[str, ...], int]:
        """The first line of each table and key; ``tomllib`` does not report lines."""
        found: dict[tuple[str, ...], int] = {}
        table: tuple[str, ...] = ()
        for number, line in enumerate(self.text.split("\n"), start=1):
            if header := _HEADER.fullmatch(line):
                table = _parts(header[1])
                key = table
            elif match := _KEY.match(line):
                key = (*table, *_parts(match[1]))
            else:
                continue
            for depth in range(1, len(key) + 1):
                found.setdefault(key[:depth], number)
        return found


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip("\"'") for part in re.findall(_PART, dotted))


def find_project_file(folder: Path | None = None) -> Path:
    """Return the nearest file, from ``folder`` upward; if there is none, its path in the working folder."""
    try:
        here = (folder or Path.cwd()).absolute()
    except FileNotFoundError:
        raise UsageError(
            "the working folder was deleted",
            hint="cd to another folder, or to it again if it was recreated",
        ) from None
    for parent in (here, *here.parents):
        path = parent / PROJECT_FILE
        if path.is_file() or path.is_symlink():
            return Path(PROJECT_FILE) if parent == Path.cwd() else path
    return Path(PROJECT_FILE)


def read_project_file(path: Path | None = None) -> ProjectFile:
    """Read a project file, by default the nearest; an empty one if there is none.

    Raises :class:`UsageError` for anything but TOML with the known tables.
    """
    path = path or find_project_file()
    # A link to what is not there, such as an unmounted disk, must not buy the defaults.
    text = read_text(path, None if path.is_symlink() else "")
    found = ProjectFile(path, parse_toml(text, str(path)), text)
    for key in found.content:
        if key not in TABLES:
            raise UsageError(
                f"{found.where(key)}: unknown table [{key}]{nearest(key, TABLES)}",
                hint="the tables are [cluster], [jobs.NAME], and [stacks.NAME]",
            )
        found.table(key)
    return found
