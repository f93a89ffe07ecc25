"""The packages that a project needs beyond the stack's: from its script's header, lock, or requirements."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.errors import UsageError
from infra.files import parse_toml, read_text
from jobs.launchers.plan import PackageList
from provision.stacks.sources import explain, find_uv

# https://packaging.python.org/en/latest/specifications/inline-script-metadata/
_HEADER = re.compile(r"(?m)^# /// script\s*$\n(?P<content>(^#(| .*)$\n)+?)^# ///\s*$")
_EXPORT_S = 120


def find_packages(given: str | None, root: Path, script: Path | None) -> PackageList | None:
    """Return what to install; ``None`` for nothing. ``given`` is a file, ``none``, or ``None``: search.

    The first of: the script's header, ``uv.lock``, ``pyproject.toml``, ``requirements.txt``.
    Raises :class:`UsageError` for a damaged file.
    """
    if given == "none":
        return None
    if given is not None:
        path = root / given
        if not path.is_file():
            raise UsageError(f"--packages {given}: no such file", hint="`none` installs nothing")
        return _read(path)
    if script and (found := read_header(script)):
        return found
    for name in ("uv.lock", "pyproject.toml", "requirements.txt"):
        if (root / name).is_file() and (found := _read(root / name)):
            return found
    return None


def _read(path: Path) -> PackageList | None:
    if path.name == "uv.lock":
        return PackageList(path.name, _export(path.parent), is_lock=True)
    if path.name == "pyproject.toml":
        project = _table(parse_toml(read_text(path), str(path)), "project", path)
        return _listed(path.name, _texts(project.get("dependencies", []), path))
    if path.suffix == ".py":
        return read_header(path)
    return _listed(path.name, _requirements(path))


def _listed(name: str, lines: Sequence[str]) -> PackageList | None:
    return PackageList(name, tuple(lines)) if lines else None


def read_header(script: Path) -> PackageList | None:
    """Return the packages in a script's PEP 723 header; ``None`` without one."""
    text = script.read_text(encoding="utf-8", errors="replace") if script.suffix == ".py" else ""
    match = _HEADER.search(text)
    if not match:
        return None
    lines = match["content"].splitlines()
    content = parse_toml("\n".join(line[2:] for line in lines), f"{script}: its script header")
    return _listed(script.name, _texts(content.get("dependencies", []), script))


def _table(content: Mapping[str, Any], key: str, path: Path) -> Mapping[str, Any]:
    table = content.get(key, {})
    if not isinstance(table, dict):
        raise UsageError(f"{path}: {key} is not a table")
    return table


def _texts(value: Any, path: Path) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise UsageError(f"{path}: dependencies is not a list of texts")
    return tuple(value)


def _requirements(path: Path, depth: int = 0) -> tuple[str, ...]:
    """Return the lines of a requirements file and of those that it includes."""
    found: list[str] = []
    for line in read_text(path).replace("\\\n", " ").splitlines():
        text = re.sub(r"(^|\s)#.*", "", line).strip()
        include = re.fullmatch(r"(?:-r|--requirement)[ =]?\s*(\S+)", text)
        if include and depth < 10:
            found += _requirements(path.parent / include[1], depth + 1)
        elif text.startswith("-"):
            raise UsageError(
                f"{path}: {text}: only requirements are supported, no options",
                hint="add the index to the stack, or name another file with --packages",
            )
        elif text:
            found.append(text)
    return tuple(found)


def _export(root: Path) -> tuple[str, ...]:
    """Return a lock's packages, with markers. Raises :class:`UsageError` with uv's reason."""
    argv = [find_uv(), "export", "--frozen", "--no-emit-project", "--no-hashes", "--no-header"]
    argv += ["--no-annotate", "--no-dev", "--quiet", "--color=never"]
    try:
        done = subprocess.run(
            argv, cwd=root, capture_output=True, text=True, timeout=_EXPORT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{root / 'uv.lock'}: uv can't read it: {error}") from None
    if done.returncode:
        raise UsageError(f"{root / 'uv.lock'}: {explain(done.stderr)}")
    lines = [line.strip() for line in done.stdout.splitlines()]
    return tuple(line for line in lines if line and not line.startswith(("#", "-e ", "./")))


def import_folders(root: Path) -> tuple[str, ...]:
    """Return the folders from which Python would import a project's packages if it were installed."""
    if not any((root / name).is_file() for name in ("pyproject.toml", "setup.py")):
        return ()
    return ("work/src",) if (root / "src").is_dir() else ("work",)


def runs_python(command: Sequence[str]) -> bool:
    """Whether a command can need Python packages: `hostname` does not."""
    name = Path(command[0]).name
    return bool(re.match(r"python|torchrun|accelerate|ipython|pytest|sh$|bash$", name)) or (
        name.endswith(".py")
    )
