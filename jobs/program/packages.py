"""The packages that a project needs beyond the stack's: from its script's header, lock, or requirements."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, StringConstraints

from infra.errors import UsageError
from infra.files import parse_as, parse_toml, read_text
from jobs.launchers.plan import SITE, PackageList
from provision.install import VENV
from provision.stacks.sources import explain, find_uv

# https://packaging.python.org/en/latest/specifications/inline-script-metadata/
_HEADER = re.compile(r"(?m)^# /// script\s*$\n(?P<content>(^#(| .*)$\n)+?)^# ///\s*$")
_EXPORT_S = 120
_OPTION = re.compile(
    r"(?P<name>-[rceif]|--(requirement|constraint|editable|index-url|extra-index-url|find-links))"
    r"[ =]*(?P<value>\S+)"
)
_SCRIPT = """\
#!{python}
import sys
from {{module}} import {{first}}
sys.exit({{function}}())
""".format(python=f"{VENV}/bin/python")


_T = TypeVar("_T")
_Name = Annotated[str, StringConstraints(pattern=r"^\w[\w.-]*$")]


class _Table(BaseModel):
    """A table of pyproject.toml, for its types: https://packaging.python.org/en/latest/specifications/."""

    model_config = ConfigDict(alias_generator=lambda name: name.replace("_", "-"))


class _Project(_Table):
    name: _Name = ""
    version: str = ""
    requires_python: str = ""
    dependencies: list[str] = []
    optional_dependencies: dict[str, list[str]] = {}
    dynamic: list[str] = []
    scripts: dict[_Name, str] = {}
    entry_points: dict[str, dict[str, str]] = {}


class _Include(_Table):
    include_group: str


class _Settings(_Table):
    project: _Project = _Project()
    dependency_groups: dict[str, list[str | _Include]] = {}


def _check(kind: type[_T], content: Any, name: str) -> _T:
    # A date is not JSON, and no value that is read is one.
    return parse_as(kind, json.dumps(content, default=lambda _: None), name)


def _read_project(path: Path) -> dict[str, Any]:
    content = parse_toml(read_text(path), str(path))
    _check(_Settings, content, str(path))
    return content


def _find(content: Any, keys: str, path: Path) -> list[str]:
    """Return texts below tables, such as ``tool.uv.workspace.members``; any of them may be missing."""
    for key in keys.split("."):
        content = content.get(key, {}) if isinstance(content, dict) else content
    listed = [content] if isinstance(content, str) else content or []
    return _check(list[str], listed, f"{path}: {keys}")


def find_packages(given: str | None, root: Path, script: Path | None) -> PackageList | None:
    """Return what to install; ``None`` for nothing. ``given`` is a file, ``none``, or ``None``: search.

    A file may have extras or dependency groups: ``uv.lock[train]``. The first of: the script's header,
    ``uv.lock``, ``pyproject.toml``, ``requirements.txt``. Raises :class:`UsageError` for a damaged file.
    """
    if given == "none":
        return None
    if given is not None:
        name, extras = _split_extras(given)
        if not _is_file(root / name):
            raise UsageError(f"--packages {given}: no such file", hint="`none` installs nothing")
        return _read(root / name, extras)
    if script and (found := read_header(script)):
        return found
    for name in ("uv.lock", "pyproject.toml", "requirements.txt"):
        if (root / name).is_file() and (found := _read(root / name)):
            return found
    return None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # such as a name that is too long
        return False


def _split_extras(given: str) -> tuple[str, tuple[str, ...]]:
    match = re.fullmatch(r"(.+?)\[([^\[\]]*)\]", given)
    if not match:
        return given, ()
    return match[1], tuple(each.strip() for each in match[2].split(",") if each.strip())


def _read(path: Path, extras: Sequence[str] = ()) -> PackageList | None:
    if path.name in ("uv.lock", "pyproject.toml"):
        project = path.with_name("pyproject.toml")
        content = _read_project(project) if project.is_file() else {}
        is_lock = path.name == "uv.lock"
        wants = _dependencies(content, project, extras, is_locked=is_lock)
        python = content.get("project", {}).get("requires-python", "")
        if is_lock:
            lines = _export(path.parent, content, extras)
            return PackageList(path.name, lines, is_lock=True, wants=wants, python=python)
        return PackageList(path.name, wants, python=python) if wants else None
    if extras:
        raise UsageError(f"--packages {path.name}: only pyproject.toml and uv.lock have extras")
    if path.suffix == ".py":
        return read_header(path)
    found = _Requirements()
    found.read(path)
    if not found.lines:
        return None
    return PackageList(
        path.name,
        tuple(found.lines),
        constraints=tuple(found.constraints),
        indexes=tuple(found.indexes),
        links=tuple(found.links),
    )


def read_header(script: Path) -> PackageList | None:
    """Return the packages in a script's PEP 723 header; ``None`` without one."""
    text = script.read_text(encoding="utf-8", errors="replace") if script.suffix == ".py" else ""
    match = _HEADER.search(text)
    if not match:
        return None
    lines = match["content"].splitlines()
    content = parse_toml("\n".join(line[2:] for line in lines), f"{script}: its script header")
    _check(_Project, content, f"{script}: its script header")
    found = tuple(content.get("dependencies", []))
    python = content.get("requires-python", "")
    return PackageList(script.name, found, python=python) if found else None


def _dependencies(
    content: Mapping[str, Any],
    path: Path,
    extras: Sequence[str],
    seen: frozenset[str] = frozenset(),
    *,
    is_locked: bool = False,
) -> tuple[str, ...]:
    """Return a project's dependencies with those of extras and groups, which may name each other."""
    project, groups = content.get("project", {}), content.get("dependency-groups", {})
    found = () if seen else _own(content, project, path, is_locked=is_locked)
    optional = project.get("optional-dependencies", {})
    for extra in extras:
        if extra in seen:
            continue
        if extra not in optional and extra not in groups:
            known = ", ".join((*optional, *groups)) or "none"
            raise UsageError(
                f"{path}: there is no extra or group {extra!r}", hint=f"known: {known}"
            )
        listed = optional[extra] if extra in optional else groups[extra]
        included = [each["include-group"] for each in listed if isinstance(each, dict)]
        for line in (each for each in listed if not isinstance(each, dict)):
            name, more = _split_extras(line)
            if name.strip() == project.get("name") and more:
                included += more
            else:
                found += (line,)
        found += _dependencies(content, path, included, seen | {extra})
    return found


def _own(
    content: Mapping[str, Any], project: Mapping[str, Any], path: Path, *, is_locked: bool
) -> tuple[str, ...]:
    """Return a project's dependencies, also those that setuptools reads from files.

    Raises :class:`UsageError` if only its build can tell, unless a lock has them.
    """
    if "dependencies" not in project.get("dynamic", []):
        return tuple(project.get("dependencies", []))
    files = _find(content, "tool.setuptools.dynamic.dependencies.file", path)
    if not files:
        if is_locked:
            return ()
        raise UsageError(
            f"{path}: its dependencies are dynamic", hint="name a list of them with --packages"
        )
    found = _Requirements()
    for name in files:
        found.read(path.parent / name)
    return tuple(found.lines)


@dataclass
class _Requirements:
    """What requirements files list, with those that they include."""

    lines: list[str] = field(default_factory=list)
    constraints: list[str] = field(default_factory=list)
    indexes: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)

    def read(self, path: Path, depth: int = 0, *, constrains: bool = False) -> None:
        for line in read_text(path).replace("\\\n", " ").splitlines():
            text = re.sub(r"(^|\s)(#.*|--hash=\S+)", "", line).strip()
            if match := _OPTION.fullmatch(text):
                self._obey(match["name"], match["value"], path, depth)
            elif text.startswith("-"):
                raise UsageError(
                    f"{path}: {text}: only requirements are supported, and -r, -c, -e, and indexes",
                    hint="name another file with --packages",
                )
            elif re.match(r"\.($|[/\[])", text):
                self._obey("-e", text, path, depth)
            elif text:
                (self.constraints if constrains else self.lines).append(text)

    def _obey(self, name: str, value: str, path: Path, depth: int) -> None:
        if name in ("-r", "--requirement", "-c", "--constraint"):
            if depth < 10:
                self.read(path.parent / value, depth + 1, constrains="c" in name[:3])
        elif name in ("-e", "--editable"):
            folder, extras = _split_extras(value)
            project = path.parent / folder / "pyproject.toml"
            if "+" in value or not _is_file(project):
                raise UsageError(f"{path}: -e {value}: no folder with a pyproject.toml")
            self.lines += _dependencies(_read_project(project), project, extras)
        else:
            (self.links if name in ("-f", "--find-links") else self.indexes).append(value)


def _export(root: Path, content: Mapping[str, Any], extras: Sequence[str]) -> tuple[str, ...]:
    """Return a lock's packages, with markers. Raises :class:`UsageError` with uv's reason."""
    argv = [find_uv(), "export", "--frozen", "--no-emit-project", "--no-hashes", "--no-header"]
    argv += ["--no-annotate", "--no-default-groups", "--quiet", "--color=never"]
    optional = content.get("project", {}).get("optional-dependencies", {})
    argv += [f"--{'extra' if each in optional else 'group'}={each}" for each in extras]
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


@dataclass(frozen=True)
class OwnPackage:
    """A project as if it were installed: where it is imported from, and files for every job."""

    imports: tuple[str, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    scripts: tuple[str, ...] = ()
    """The names of its console scripts."""


def read_own_package(root: Path) -> OwnPackage:
    """Return a project's import folders, console scripts, and metadata, which some packages read."""
    if not any((root / name).is_file() for name in ("pyproject.toml", "setup.py")):
        return OwnPackage()
    path = root / "pyproject.toml"
    content = _read_project(path) if path.is_file() else {}
    folders = [root]
    for pattern in _find(content, "tool.uv.workspace.members", path):
        try:
            found = [each for each in sorted(root.glob(pattern)) if each != root]
        except (ValueError, NotImplementedError, OSError) as error:
            raise UsageError(f"{path}: tool.uv.workspace: members: {error}") from None
        folders += [each for each in found if each.resolve().is_relative_to(root.resolve())]
    sources = [each / "src" if (each / "src").is_dir() else each for each in folders]
    imports = tuple(f"work/{each.relative_to(root)}".removesuffix("/.") for each in sources)
    project = content.get("project", {})
    if "name" not in project:
        return OwnPackage(imports)
    name = f"{SITE}/{re.sub('[-.]+', '_', project['name'])}.dist-info"
    version = project.get("version", "0")
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version}\n"
    entries = {"console_scripts": project.get("scripts", {})}
    entries = {**project.get("entry-points", {}), **entries}
    listed = "".join(
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entry.items())
        for group, entry in entries.items()
    )
    files = {f"{name}/METADATA": metadata.encode(), f"{name}/entry_points.txt": listed.encode()}
    for script, target in entries["console_scripts"].items():
        module, _, function = target.partition("[")[0].strip().partition(":")
        files[f"{SITE}/bin/{script}"] = _SCRIPT.format(
            module=module, function=function, first=function.partition(".")[0]
        ).encode()
    return OwnPackage((*imports, SITE), files, tuple(entries["console_scripts"]))


def runs_python(command: Sequence[str], scripts: Sequence[str] = ()) -> bool:
    """Whether a command can need Python packages: `hostname` does not."""
    name = Path(command[0]).name
    return (
        name in scripts
        or bool(re.match(r"python|torchrun|accelerate|ipython|pytest|sh$|bash$", name))
        or name.endswith(".py")
    )
