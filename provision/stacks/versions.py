"""Requirements and versions, as far as stacks need them: names, exact pins, simple bounds. Pure."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_VERSION = r"[0-9]+(?:\.[0-9]+)*(?:(?:a|b|rc|\.post|\.dev)[0-9]+)?(?:\+[A-Za-z0-9.]+)?"
_BOUND = re.compile(rf"\s*(==|!=|<=|>=|<|>)\s*({_VERSION})\s*", re.ASCII)
_REQUIREMENT = re.compile(rf"\s*({_NAME})(\[[A-Za-z0-9,._ -]+\])?\s*(.*)", re.ASCII)
_COMPARE: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}


@dataclass(frozen=True)
class Requirement:
    """A package's name, in PyPI's normal form, and the bounds of its version: (operator, version)."""

    text: str
    name: str
    bounds: tuple[tuple[str, str], ...]

    @property
    def pinned(self) -> str | None:
        """The one version that fits, without its local part (``+cpu``)."""
        exact = [version for sign, version in self.bounds if sign == "=="]
        return exact[0].split("+")[0] if len(self.bounds) == 1 and exact else None

    def accepts(self, version: str) -> bool:
        found = release(version)
        return all(_COMPARE[sign](found, release(bound)) for sign, bound in self.bounds)


def parse_requirement(text: str) -> Requirement | None:
    """A requirement such as ``torch==2.7.0`` or ``numpy>=1.2,<2.4``; ``None`` for anything else.

    Markers, URLs and options of pip are no requirements of a stack: it is for one platform alone.
    """
    match = _REQUIREMENT.fullmatch(text)
    if not match:
        return None
    bounds = []
    for part in filter(None, match[3].split(",")):
        bound = _BOUND.fullmatch(part)
        if not bound:
            return None
        bounds.append((bound[1], bound[2]))
    # https://packaging.python.org/en/latest/specifications/name-normalization/
    return Requirement(text.strip(), re.sub(r"[-_.]+", "-", match[1]).lower(), tuple(bounds))


def release(version: str) -> tuple[int, ...]:
    """A version's numbers without zeros at the end, so that 1.13 is 1.13.0; the local part is left out."""
    match = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    numbers = [int(number) for number in match[0].split(".")] if match else [0]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def is_final(version: str) -> bool:
    """Numbers and dots alone, as every matched release has."""
    return bool(re.fullmatch(r"[0-9]+(\.[0-9]+)*", version, re.ASCII))


def fits(version: str, pattern: str) -> bool:
    """Whether a version is the one that a pattern names, or of its series (``2.0.*``)."""
    if not pattern.endswith(".*"):
        return release(version) == release(pattern)
    series = [int(number) for number in pattern.removesuffix(".*").split(".")]
    numbers = [*release(version), 0, 0, 0]
    return numbers[: len(series)] == series


def python_minor(version: str) -> tuple[int, int]:
    """(3, 10) of ``3.10``, whose zero counts."""
    major, _, minor = version.partition(".")
    return int(major), int(minor.split(".")[0] or 0)
