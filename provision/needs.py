"""What packages need on a node, which need not be what they need here. Pure.

pip reads markers such as ``python_version < "3.11"`` as for the Python that it runs on, whatever
``--python-version`` says: https://github.com/pypa/pip/issues/11664. So its answer is walked through
once more, by the markers of the machine that it is for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

# The last number counts for few markers; it is that of the Ubuntu release with this Python.
_FULL_PYTHON = {"3.8": "3.8.10", "3.10": "3.10.12", "3.12": "3.12.3"}


@dataclass(frozen=True)
class Wheel:
    """A file that pip chose: ``needs`` are its own requirements, with their markers."""

    name: str
    version: str
    url: str = ""
    sha256: str = ""
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Needs:
    """``wheels`` are those that the node needs, ``unmet`` the requirements that none of them meets."""

    wheels: tuple[Wheel, ...]
    unmet: tuple[str, ...]


def find_needs(roots: Sequence[str], wheels: Iterable[Wheel], python: str) -> Needs:
    """Follow the requirements of a node with this Python from ``roots`` on."""
    by_name = {wheel.name: wheel for wheel in wheels}
    environment = _environment(python)
    todo = list(_parse(roots))
    seen: set[tuple[str, str]] = set()
    unmet: dict[str, None] = {}
    while todo:
        need = todo.pop(0)
        wheel = by_name.get(canonicalize_name(need.name))
        if wheel is None or not need.specifier.contains(wheel.version, prereleases=True):
            need.marker = None
            unmet[str(need)] = None
            continue
        for extra in ("", *sorted(need.extras)):
            if (wheel.name, extra) not in seen:
                seen.add((wheel.name, extra))
                todo += _applying(wheel.needs, {**environment, "extra": extra})
    names = {name for name, _ in seen}
    return Needs(tuple(w for w in by_name.values() if w.name in names), tuple(unmet))


def _applying(texts: Iterable[str], environment: Mapping[str, str]) -> list[Requirement]:
    return [
        need
        for need in _parse(texts)
        if need.marker is None or need.marker.evaluate(dict(environment))
    ]


def _parse(texts: Iterable[str]) -> Iterable[Requirement]:
    for text in texts:
        try:
            yield Requirement(text)
        except InvalidRequirement:
            continue  # words of an old package that pip leaves out, too


def _environment(python: str) -> dict[str, str]:
    # https://packaging.python.org/en/latest/specifications/dependency-specifiers/#environment-markers
    full = _FULL_PYTHON.get(python, f"{python}.0")
    return {
        "os_name": "posix",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
        "implementation_name": "cpython",
        "implementation_version": full,
        "python_version": python,
        "python_full_version": full,
    }
