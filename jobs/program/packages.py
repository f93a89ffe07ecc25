"""The packages that a project needs beyond the stack's: from its script's header, lock, or requirements."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from uv import find_uv_bin

from infra.errors import UsageError
from infra.files import parse_toml, read_text
from jobs.places.packages import is_stacks
from jobs.places.plan import PackageList
from jobs.program.pyproject import (
    ProjectTable,
    check_table,
    dependencies,
    read_project,
    split_extras,
)
from jobs.program.requirements import Requirements
from provision.stacks.sources import PYPI, explain

# https://packaging.python.org/en/latest/specifications/inline-script-metadata/
_HEADER = re.compile(r"(?m)^# /// script\s*$\n(?P<content>(^#(| .*)$\n)+?)^# ///\s*$")
_EXPORT_S = 120
_UNREAD = "pyproject.toml setup.py setup.cfg environment.yml environment.yaml Pipfile pixi.toml"
_LISTS = re.compile(
    r"^\[((tool\.(poetry|pixi)\.)?(pypi-)?dependencies|packages)\]\n([^\[\n].*\n|\n)*?(?!python\b)[\w\"].*="
    r"|\binstall_requires\s*=\s*(?!None|\[\s*\])|^dependencies:",
    re.MULTILINE,
)
"""Files that are not read, and the beginnings of their lists of packages."""


class UnreadListError(UsageError):
    """A project lists its packages only in a file that is not read."""


def find_packages(
    given: str | None, root: Path, script: Path | None, here: Path | None = None
) -> PackageList | None:
    """Return what to install; ``None`` for nothing. ``given`` is a file, ``none``, or ``None``: search.

    A file is in the folder ``here``, or else in the project's ``root``. It may have extras or dependency
    groups: ``uv.lock[train]``. The first of: the script's header, ``uv.lock``, ``pyproject.toml``,
    ``requirements.txt``. Raises :class:`UsageError` for a damaged file, and for packages that would be
    replaced by others of their name; :class:`UnreadListError` for packages that would be ignored.
    """
    if given == "none":
        return None
    if given is not None:
        name, extras = split_extras(given)
        name = os.path.expanduser(name)  # noqa: PTH111 - pathlib's fails for unknown users
        files = dict.fromkeys(folder.absolute() / name for folder in (here or root, root))
        for file in filter(Path.is_file, files):
            return _read(file, root, extras)
        raise UsageError(
            f"--packages {given}: no such file: {' or '.join(map(str, files))}",
            hint="`none` installs nothing",
        )
    if script and (found := _read_header(script, root)):
        return found
    python = ""
    for name in ("uv.lock", "pyproject.toml", "requirements.txt"):
        if (root / name).is_file() and (found := _read(root / name, root)):
            python = python or found.python
            if found.lines or found.imports:
                return replace(found, python=python)
    for name in _UNREAD.split():
        if _LISTS.search(read_text(root / name, "", errors="replace")):
            raise UnreadListError(
                f"{root / name}: its dependencies are not read",
                hint="list them in requirements.txt, or install nothing with `--packages none`",
            )
    return PackageList("pyproject.toml", (), python=python) if python else None


def _read(path: Path, root: Path, extras: Sequence[str] = ()) -> PackageList | None:
    is_project = path.name in ("uv.lock", "pyproject.toml")
    if extras and not is_project:
        raise UsageError(f"--packages {path.name}: only pyproject.toml and uv.lock have extras")
    if path.suffix == ".py":
        return _read_header(path, root)
    found, project = Requirements(root, path.name == "uv.lock"), path.with_name("pyproject.toml")
    if not is_project:
        found.read(path)
        return found.as_list(path.name) if found.lines or found.imports else None
    content = read_project(project) if project.is_file() else {}
    wants = dependencies(content, project, extras, is_locked=found.is_lock)
    python = content.get("project", {}).get("requires-python", "")
    if found.is_lock:
        found.add(_export(path.parent, content, extras), path)
        return found.as_list(path.name, wants=wants, python=python)
    found.add_project(content, wants, path)
    return found.as_list(path.name, python=python)


def _read_header(script: Path, root: Path) -> PackageList | None:
    """Return the packages in a script's PEP 723 header; ``None`` without one."""
    text = script.read_text(encoding="utf-8", errors="replace") if script.suffix == ".py" else ""
    match = _HEADER.search(text)
    if not match:
        return None
    lines = match["content"].splitlines()
    content = parse_toml("\n".join(line[2:] for line in lines), f"{script}: its script header")
    check_table(ProjectTable, content, f"{script}: its script header")
    found, listed = Requirements(root), content.get("dependencies", [])
    found.add_project(content, listed, script)
    return found.as_list(script.name, python=content.get("requires-python", "")) if listed else None


def _export(root: Path, content: Mapping[str, Any], extras: Sequence[str]) -> str:
    """Return a lock's packages and indexes as requirements. Raises :class:`UsageError` with uv's reason."""
    argv = [find_uv_bin(), "export", "--frozen", "--no-emit-project", "--no-header"]
    argv += ["--no-annotate", "--no-default-groups", "--quiet", "--color=never"]
    optional = {
        *map(canonicalize_name, content.get("project", {}).get("optional-dependencies", {}))
    }
    argv += [f"--{'extra' if each in optional else 'group'}={each}" for each in extras]
    try:
        done = subprocess.run(
            argv, cwd=root, capture_output=True, text=True, timeout=_EXPORT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{root / 'uv.lock'}: uv can't read it: {error}") from None
    if done.returncode:
        raise UsageError(f"{root / 'uv.lock'}: {explain(done.stderr)}")
    locked = parse_toml(read_text(root / "uv.lock"), str(root / "uv.lock")).get("package", [])
    others = {each["source"].get("registry") for each in locked if not is_stacks(each["name"])}
    indexes = (f"--extra-index-url={url}" for url in sorted(others - {None, PYPI}))
    return "\n".join((*indexes, done.stdout))
