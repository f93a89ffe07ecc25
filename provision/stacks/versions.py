"""Requirements and versions of stacks, by ``packaging``'s rules. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from packaging.requirements import InvalidRequirement
from packaging.requirements import Requirement as PackagingRequirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version


@dataclass(frozen=True)
class Requirement:
    """A package's name, in PyPI's normal form, and the versions that fit."""

    text: str
    name: str
    versions: SpecifierSet

    @property
    def pinned(self) -> str | None:
        """The one version that fits, without its local part (``+cpu``); ``None`` if more may fit."""
        exact = [one.version for one in self.versions if one.operator == "=="]
        one = len(self.versions) == 1 and exact and not exact[0].endswith(".*")
        return exact[0].split("+")[0] if one else None

    def accepts(self, version: str) -> bool:
        try:
            return self.versions.contains(version, prereleases=True)
        except InvalidVersion:
            return False


def parse_requirement(text: str) -> Requirement | None:
    """Parse a requirement such as ``torch==2.7.0`` or ``numpy>=1.2,<2.4``; ``None`` for anything else.

    A stack is for one platform, so its requirements have neither markers nor URLs.
    """
    try:
        found = PackagingRequirement(text)
    except InvalidRequirement:
        return None
    if found.marker or found.url:
        return None
    return Requirement(text.strip(), canonicalize_name(found.name), found.specifier)


def release(version: str) -> Version:
    """A version's numbers alone, without ``rc1`` or ``+cpu``; 0 for text that is no version."""
    try:
        return Version(Version(version).base_version)
    except InvalidVersion:
        return Version("0")


def is_final(version: str) -> bool:
    """Whether a version is numbers and dots alone, as every matched release is."""
    return str(release(version)) == version


def fits(version: str, pattern: str) -> bool:
    """Whether a version is the one that a pattern names, or of its series (``2.0.*``)."""
    return SpecifierSet(f"=={pattern}").contains(release(version))


def python_minor(version: str) -> tuple[int, int]:
    """(3, 10) of ``3.10.12``."""
    return Version(version).major, Version(version).minor
