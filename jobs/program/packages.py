"""The packages that a project needs beyond the stack's: from its script's header, lock, or requirements."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from packaging.utils import canonicalize_name
from pydantic import BaseModel, ConfigDict, StringConstraints

from infra.errors import UsageError
from infra.files import parse_as, parse_toml, read_text
from jobs.launchers.packages import is_stacks, parse_line
from jobs.launchers.plan import SITE, PackageList
from provision.install import VENV
from provision.stacks.sources import PYPI, explain, find_uv

# https://packaging.python.org/en/latest/specifications/inline-script-metadata/
_HEADER = re.compile(r"(?m)^# /// script\s*$\n(?P<content>(^#(| .*)$\n)+?)^# ///\s*$")
_EXPORT_S = 120
_OPTION = re.compile(
    r"(?P<name>-[rcif]|--(requirement|constraint|index-url|extra-index-url|find-links))"
    r"[ =]*(?P<value>\S+)"
)
_EDITABLE, _VARIABLE = re.compile(r"(-e|--editable)[ =]*"), re.compile(r"\$\{([A-Z0-9_]+)\}")
_LOCAL = re.compile(
    r"([\w.-]+(\[[^\]]*\])?\s*@\s*)?(?!(?!file:)[\w+]+:)(file:(//)?)?"
    r"(?P<place>[./~].*|[^\s;<>=!~@[(]*(/.*|\.whl|\.zip|\.tar\.gz))"
)
"""A requirement that is a path, such as ``./lib``, ``a.whl``, or ``lib @ file:///lib``."""
_PLACES = {"path", "file", "git", "url", "source", "index", "workspace"}
_UNREAD = "pyproject.toml setup.py setup.cfg environment.yml environment.yaml Pipfile"
_LISTS = re.compile(
    r"^\[(tool\.(poetry|pixi)\.(pypi-)?dependencies|packages)\]\n([^\[].*\n|\n)*?(?!python\b)[\w\"].*="
    r"|\binstall_requires\s*=\s*(?!None|\[\s*\])|^dependencies:",
    re.MULTILINE,
)
"""Files that are not read, and the beginnings of their lists of packages."""
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
    tool: dict[str, Any] = {}
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
    ``uv.lock``, ``pyproject.toml``, ``requirements.txt``. Raises :class:`UsageError` for a damaged file,
    and for packages that would be ignored, or replaced by others of their name.
    """
    if given == "none":
        return None
    if given is not None:
        name, extras = _split_extras(given)
        if not _is_file(root / name):
            raise UsageError(f"--packages {given}: no such file", hint="`none` installs nothing")
        return _read(root / name, root, extras)
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
            raise UsageError(
                f"{root / name}: its dependencies are not read",
                hint="list them in requirements.txt, or install nothing with `--packages none`",
            )
    return PackageList("pyproject.toml", (), python=python) if python else None


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


def _read(path: Path, root: Path, extras: Sequence[str] = ()) -> PackageList | None:
    is_project = path.name in ("uv.lock", "pyproject.toml")
    if extras and not is_project:
        raise UsageError(f"--packages {path.name}: only pyproject.toml and uv.lock have extras")
    if path.suffix == ".py":
        return _read_header(path, root)
    found, project = _Requirements(root, path.name == "uv.lock"), path.with_name("pyproject.toml")
    if not is_project:
        found.read(path)
        return found.as_list(path.name) if found.lines or found.imports else None
    content = _read_project(project) if project.is_file() else {}
    wants = _dependencies(content, project, extras, is_locked=found.is_lock)
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
    _check(_Project, content, f"{script}: its script header")
    found, listed = _Requirements(root), content.get("dependencies", [])
    found.add_project(content, listed, script)
    return found.as_list(script.name, python=content.get("requires-python", "")) if listed else None


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
    return tuple(line for name in files for line in read_text(path.parent / name).splitlines())


@dataclass
class _Requirements:
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
        _refuse_sources(content, wants, path)
        self.add("\n".join(wants), path)

    def add(self, text: str, path: Path, depth: int = 0, *, constrains: bool = False) -> None:
        """Add the lines of a requirements file. Raises :class:`UsageError` for what is not supported."""
        for line in text.replace("\\\n", " ").splitlines():
            found = _expand(re.sub(r"(^|\s)#.*", "", line).strip(), path)
            if editable := _EDITABLE.match(found):
                found = found[editable.end() :]
                found = found if "://" in found or _LOCAL.match(found) else f"./{found}"
            if match := _OPTION.fullmatch(found):
                self._obey(match["name"], match["value"], path, depth)
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
        name, extras = _split_extras(place)
        folder = path.parent / name
        project = folder / "pyproject.toml"
        root = self.root.resolve()
        if not _is_file(project) or not folder.resolve().is_relative_to(root):
            raise UsageError(
                f"{path}: {line}: only folders of the project with a pyproject.toml are supported",
                hint="move it to such a folder, a package index, or git; or use another list (--packages)",
            )
        place = _import_folder(folder.resolve()).relative_to(root).as_posix()
        if place in self.imports:
            return
        self.imports.append(place)
        if not self.is_lock:
            content = _read_project(project)
            self.add_project(content, _dependencies(content, project, extras), project)

    def _obey(self, name: str, value: str, path: Path, depth: int) -> None:
        if name in ("-r", "--requirement", "-c", "--constraint"):
            if depth < 10:
                self.read(path.parent / value, depth + 1, constrains="c" in name[:3])
        elif "://" not in value or value.startswith("file:"):
            raise UsageError(
                f"{path}: {name} {value}: a folder of this machine, which the nodes don't have",
                hint="name an address, or another list with --packages",
            )
        elif name in ("-i", "--index-url"):
            self.index = value
        else:
            (self.links if name in ("-f", "--find-links") else self.indexes).append(value)


def _refuse_sources(content: Mapping[str, Any], wants: Sequence[str], path: Path) -> None:
    """Raise :class:`UsageError` if uv or another tool would get a package from elsewhere."""
    names = [one.name for one in map(parse_line, wants) if one and not is_stacks(one.name)]
    asked = {"index", "source", *map(canonicalize_name, names)} if names else set()
    for name in asked.intersection(_find_sources(content)):
        raise UsageError(
            f"{path}: sets another source of packages ({name}), which only a lock can do here",
            hint="run `uv lock`, ask for NAME @ URL, or name a requirements file with --packages",
        )


def _find_sources(table: Any) -> Iterator[str]:
    """Yield the names of packages that a tool gets from elsewhere, and "index" or "source" for all."""
    for name, value in table.items() if isinstance(table, dict) else ():
        for each in value if isinstance(value, list) else [value]:
            found = each if isinstance(each, dict) else {}
            is_for_some = found.get("explicit") or found.get("priority") == "explicit"
            if _PLACES & {*found} and not is_for_some:
                yield canonicalize_name(name)
            yield from _find_sources(each)


def _import_folder(folder: Path) -> Path:
    """Return the folder from which a project's modules are imported."""
    return folder / "src" if (folder / "src").is_dir() else folder


def _expand(line: str, path: Path) -> str:
    """Replace ``${NAME}`` with this machine's variables, as pip does."""
    if missing := [name for name in _VARIABLE.findall(line) if name not in os.environ]:
        raise UsageError(f"{path}: {missing[0]} is not set here", hint=f"export {missing[0]}=…")
    return _VARIABLE.sub(lambda match: os.environ[match[1]], line)


def _export(root: Path, content: Mapping[str, Any], extras: Sequence[str]) -> str:
    """Return a lock's packages and indexes as requirements. Raises :class:`UsageError` with uv's reason."""
    argv = [find_uv(), "export", "--frozen", "--no-emit-project", "--no-header"]
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
    locked = parse_toml(read_text(root / "uv.lock"), str(root / "uv.lock")).get("package", [])
    others = {each["source"].get("registry") for each in locked if not is_stacks(each["name"])}
    indexes = (f"--extra-index-url={url}" for url in sorted(others - {None, PYPI}))
    return "\n".join((*indexes, done.stdout))


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
    sources = map(_import_folder, folders)
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
