"""Requirements files as pip reads them, with those that they include."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.errors import UsageError
from infra.files import read_text
from jobs.places.plan import PackageList
from jobs.program.pyproject import (
    dependencies,
    import_folder,
    read_project,
    refuse_sources,
    split_extras,
)

_OPTION = re.compile(
    r"(?P<name>-[rcif]|--(requirement|constraint|index-url|extra-index-url|find-links))"
    r"[ =]*(?P<value>\S+|'[^']+'|\"[^\"]+\")"
)
_EDITABLE, _VARIABLE = re.compile(r"(-e|--editable)[ =]*"), re.compile(r"\$\{([A-Z0-9_]+)\}")
_LOCAL = re.compile(
    r"([\w.-]+(\[[^\]]*\])?\s*@\s*)?(?!(?!file:)[\w+]+:)(file:(//)?)?"
    r"(?P<place>[./~].*|[^\s;<>=!~@[(]*(/.*|\.whl|\.zip|\.tar\.gz))"
)
"""A requirement that is a path, such as ``./lib``, ``a.whl``, or ``lib @ file:///lib``."""


@dataclass
class Requirements:
    """What requirements files list, with those that they include; ``root`` is the project's folder."""

    root: Path
    is_lock: bool = False
    """Whether the lines have the dependencies of the project's own folders."""
    lines: list[str] = field(default_factory=list)
    constraints: list[str] = field(default_factory=list)
    index: str = ""
    indexes: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    imports: list[str] = field(default_factory=list)

    def as_list(self, source: str, **more: Any) -> PackageList:
        """Return them as what a job installs."""
        found = {name: value for name, value in vars(self).items() if name != "root"}
        lists = {name: tuple(each) for name, each in found.items() if isinstance(each, list)}
        return PackageList(source, **{**found, **lists, **more})

    def read(self, path: Path, depth: int = 0, *, constrains: bool = False) -> None:
        self.add(read_text(path), path, depth, constrains=constrains)

    def add_project(self, content: Mapping[str, Any], wants: Sequence[str], path: Path) -> None:
        """Add what a project asks for."""
        refuse_sources(content, wants, path)
        self.add("\n".join(wants), path)

    def add(self, text: str, path: Path, depth: int = 0, *, constrains: bool = False) -> None:
        """Add the lines of a requirements file. Raises :class:`UsageError` for what is not supported."""
        for line in text.replace("\\\n", " ").splitlines():
            found = _expand(re.sub(r"(^|\s)#.*", "", line).strip(), path)
            if editable := _EDITABLE.match(found):
                found = found[editable.end() :]
                found = found if "://" in found or _LOCAL.match(found) else f"./{found}"
            if match := _OPTION.fullmatch(found):
                value = match["value"].strip("'\"")
                self._obey(match["name"], value, path, depth, constrains=constrains)
            elif found.startswith("-"):
                raise UsageError(
                    f"{path}: {line}: only requirements are supported, and -r, -c, -e, and indexes",
                    hint="name another file with --packages",
                )
            elif match := _LOCAL.match(found):
                self._add_folder(found, re.split(" ?;| --", match["place"])[0].strip(), path)
            elif found:
                (self.constraints if constrains else self.lines).append(" ".join(found.split()))

    def _add_folder(self, line: str, place: str, path: Path) -> None:
        name, extras = split_extras(place)
        # pip's paths begin at its working folder, uv's at the lock.
        places = [each / name for each in (path.parent, self.root)]
        folder = next((each for each in places if (each / "pyproject.toml").is_file()), places[0])
        project, root = folder / "pyproject.toml", self.root.resolve()
        if not project.is_file() or not folder.resolve().is_relative_to(root):
            raise UsageError(
                f"{path}: {line}: only folders of the project with a pyproject.toml are supported",
                hint="move it to such a folder, a package index, or git; or use another list (--packages)",
            )
        place = import_folder(folder.resolve()).relative_to(root).as_posix()
        if place in self.imports:
            return
        self.imports.append(place)
        if not self.is_lock:
            content = read_project(project)
            self.add_project(content, dependencies(content, project, extras), project)

    def _obey(self, name: str, value: str, path: Path, depth: int, *, constrains: bool) -> None:
        if name in ("-r", "--requirement", "-c", "--constraint"):
            if depth < 10:
                is_constraint = constrains or "c" in name[:3]
                self.read(path.parent / value, depth + 1, constrains=is_constraint)
        elif "://" not in value or value.startswith("file:"):
            raise UsageError(
                f"{path}: {name} {value}: a folder of this machine, which the nodes don't have",
                hint="name an address, or another list with --packages",
            )
        elif name in ("-i", "--index-url"):
            self.index = value
        else:
            (self.links if name in ("-f", "--find-links") else self.indexes).append(value)


def _expand(line: str, path: Path) -> str:
    """Replace ``${NAME}`` with this machine's variables, as pip does."""
    if missing := [name for name in _VARIABLE.findall(line) if name not in os.environ]:
        raise UsageError(f"{path}: {missing[0]} is not set here", hint=f"export {missing[0]}=…")
    return _VARIABLE.sub(lambda match: os.environ[match[1]], line)
