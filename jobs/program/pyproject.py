"""A project's pyproject.toml: what it depends on, and what would be installed of the project itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from packaging.utils import canonicalize_name
from pydantic import BaseModel, ConfigDict, StringConstraints

from infra.errors import UsageError
from infra.files import parse_as, parse_toml, read_text
from jobs.places.packages import is_stacks, parse_line
from jobs.places.plan import SITE
from provision.install import VENV

_PLACES = {"path", "file", "git", "url", "source", "index", "workspace"}

_SCRIPT = """\
#!{python}
import sys
from {{module}} import {{first}}
sys.exit({{function}}())
""".format(python=f"{VENV}/bin/python")

_PLAIN_TOOL = re.compile(
    "cat|date|df|du|echo|false|free|head|hostname|id|ip|ls|lsblk|lscpu|lsmem|nproc|numastat|nvidia-smi|pwd"
    "|lstopo|printenv|ps|sleep|tail|true|uname|uptime|whoami"
)
_STARTS_PYTHON = re.compile(
    r"(i?python|torchrun|accelerate|pytest)[\d.]*|(z|k|ba|da)?sh|make|mpi(run|exec)|.+\.(py|sh)"
)
_T = TypeVar("_T")
_Name = Annotated[str, StringConstraints(pattern=r"^\w[\w.-]*$")]


class _Table(BaseModel):
    """A table of pyproject.toml, for its types: https://packaging.python.org/en/latest/specifications/."""

    model_config = ConfigDict(alias_generator=lambda name: name.replace("_", "-"))


class ProjectTable(_Table):
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
    project: ProjectTable = ProjectTable()
    tool: dict[str, Any] = {}
    dependency_groups: dict[str, list[str | _Include]] = {}


def check_table(kind: type[_T], content: Any, name: str) -> _T:
    # A date is not JSON, and no value that is read is one.
    return parse_as(kind, json.dumps(content, default=lambda _: None), name)


def read_project(path: Path) -> dict[str, Any]:
    content = parse_toml(read_text(path), str(path))
    check_table(_Settings, content, str(path))
    return content


def _find_texts(content: Any, keys: str, path: Path) -> list[str]:
    """Return texts below tables, such as ``tool.uv.workspace.members``; any of them may be missing."""
    for key in keys.split("."):
        content = content.get(key, {}) if isinstance(content, dict) else content
    listed = [content] if isinstance(content, str) else content or []
    return check_table(list[str], listed, f"{path}: {keys}")


def split_extras(given: str) -> tuple[str, tuple[str, ...]]:
    match = re.fullmatch(r"(.+?)\[([^\[\]]*)\]", given)
    if not match:
        return given, ()
    return match[1], tuple(
        canonicalize_name(each.strip()) for each in match[2].split(",") if each.strip()
    )


def dependencies(
    content: Mapping[str, Any],
    path: Path,
    extras: Sequence[str],
    seen: frozenset[str] = frozenset(),
    *,
    is_locked: bool = False,
) -> tuple[str, ...]:
    """Return a project's dependencies with those of extras and groups, which may name each other."""
    project = content.get("project", {})
    found = () if seen else _own(content, project, path, is_locked=is_locked)
    listed = {**content.get("dependency-groups", {}), **project.get("optional-dependencies", {})}
    known = {canonicalize_name(name): lines for name, lines in listed.items()}
    own = canonicalize_name(project.get("name", ""))
    for extra in map(canonicalize_name, extras):
        if extra in seen:
            continue
        if extra not in known:
            raise UsageError(
                f"{path}: there is no extra or group {extra!r}",
                hint=f"known: {', '.join(known) or 'none'}",
            )
        included = [each["include-group"] for each in known[extra] if isinstance(each, dict)]
        for line in (each for each in known[extra] if not isinstance(each, dict)):
            name, more = split_extras(line)
            if more and canonicalize_name(name.strip()) == own:
                included += more
            else:
                found += (line,)
        found += dependencies(content, path, included, seen | {extra})
    return found


def _own(
    content: Mapping[str, Any], project: Mapping[str, Any], path: Path, *, is_locked: bool
) -> tuple[str, ...]:
    """Return a project's dependencies, also those that setuptools reads from files.

    Raises :class:`UsageError` if only its build can tell, unless a lock has them.
    """
    if "dependencies" not in project.get("dynamic", []):
        return tuple(project.get("dependencies", []))
    files = _find_texts(content, "tool.setuptools.dynamic.dependencies.file", path)
    if not files:
        if is_locked:
            return ()
        raise UsageError(
            f"{path}: its dependencies are dynamic", hint="name a list of them with --packages"
        )
    return tuple(line for name in files for line in read_text(path.parent / name).splitlines())


def refuse_sources(content: Mapping[str, Any], wants: Sequence[str], path: Path) -> None:
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


def import_folder(folder: Path) -> Path:
    """Return the folder from which a project's modules are imported."""
    return folder / "src" if (folder / "src").is_dir() else folder


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
    content = read_project(path) if path.is_file() else {}
    folders = [root]
    for pattern in _find_texts(content, "tool.uv.workspace.members", path):
        try:
            found = [each for each in sorted(root.glob(pattern)) if each != root]
        except (ValueError, NotImplementedError, OSError) as error:
            raise UsageError(f"{path}: tool.uv.workspace: members: {error}") from None
        folders += [each for each in found if each.resolve().is_relative_to(root.resolve())]
    sources = map(import_folder, folders)
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


def needs_packages(command: Sequence[str], scripts: Sequence[str]) -> bool:
    """Whether a command can need Python packages: `hostname` does not, other programs may run Python."""
    program = Path(command[0]).name if command[0].startswith("/") else command[0]
    return command[0] in scripts or not _PLAIN_TOOL.fullmatch(program)


def may_run_python(command: Sequence[str], scripts: Sequence[str]) -> bool:
    """Whether a word of a command is Python, a script, or what usually starts one, such as `bash`."""
    return any(word in scripts or _STARTS_PYTHON.fullmatch(Path(word).name) for word in command)
