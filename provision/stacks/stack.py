"""A stack: all of a node's software as one value. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from packaging.requirements import InvalidRequirement
from packaging.requirements import Requirement as PackagingRequirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, ConfigDict

from infra.errors import UsageError

TORCH = "torch"
IPEX = "intel-extension-for-pytorch"
BINDING = "oneccl-bind-pt"
TRANSFORMERS = "transformers"
MPI = "impi-rt"
# Since 1.12: https://github.com/intel/torch-ccl
_BINDING_MODULE = "oneccl_bindings_for_pytorch"
ENVIRONMENT_LOOKUP = f"import {_BINDING_MODULE} as ccl; print(ccl.cwd)"
"""Python code, for the node, that prints the folder with ``env/setvars.sh``.

https://huggingface.co/docs/transformers/v4.28.1/en/perf_train_cpu_many
"""


@dataclass(frozen=True)
class Requirement:
    """A package's name, in PyPI's normal form, and the versions that fit."""

    text: str
    name: str
    versions: SpecifierSet

    @property
    def pinned(self) -> str | None:
        """The exact version, without its local part (``+cpu``); ``None`` if several versions fit."""
        exact = [one.version for one in self.versions if one.operator == "=="]
        one = len(self.versions) == 1 and exact and not exact[0].endswith(".*")
        return exact[0].split("+")[0] if one else None

    def accepts(self, version: str) -> bool:
        try:
            return self.versions.contains(version, prereleases=True)
        except InvalidVersion:
            return False


@cache
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
    """Whether a version matches a pattern: the same version, or its series (``2.0.*``)."""
    return SpecifierSet(f"=={pattern}").contains(release(version))


def python_minor(version: str) -> tuple[int, int]:
    """(3, 10) of ``3.10.12``."""
    return Version(version).major, Version(version).minor


class Stack(BaseModel):
    """A matched set of software. ``indexes`` are searched besides PyPI; ``find_links`` are pages of links."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    summary: str
    ubuntu: str
    python: str
    """Ubuntu's ``python3``, which runs the node's environment."""
    launcher: Literal["mpirun"] = "mpirun"
    backend: Literal["ccl", "gloo"]
    use_ipex: bool
    indexes: tuple[str, ...]
    find_links: tuple[str, ...] = ()
    system_packages: tuple[str, ...]
    python_packages: tuple[str, ...]
    pip: str = ""
    """The pip to install with, if the release's own is too old for today's wheels."""
    environment: dict[str, str] = {}
    """Environment variables of every rank of a job; they are not in the image."""
    examples: str = ""
    """A source archive of transformers; its question-answering examples are installed on the nodes."""
    lock: tuple[str, ...] = ()
    """Every package with its version and hashes, as lines for pip; empty if nodes resolve themselves."""

    def requirement(self, package: str) -> Requirement | None:
        """The stack's requirement of a package, by its name in PyPI's normal form."""
        for text in self.python_packages:
            found = parse_requirement(text)
            if found and found.name == package:
                return found
        return None

    def choose_backend(self, backend: str) -> str:
        """Return the requested communication backend; for ``auto``, the stack's own.

        Raises :class:`UsageError` for one that the stack lacks.
        """
        if backend == "ccl":
            self._require(BINDING, "--backend ccl")
        return self.backend if backend == "auto" else backend

    def choose_ipex(self, wanted: bool) -> bool:
        """Return whether to use Intel's extension. Raises :class:`UsageError` if the stack lacks it."""
        if wanted:
            self._require(IPEX, "--ipex")
        return wanted or self.use_ipex

    def _require(self, package: str, option: str) -> None:
        if not self.requirement(package):
            raise UsageError(
                f"{option}: stack {self.name} has no {package}",
                hint="omit it, or use a stack that has it, such as intel",
            )

    def pin(self, package: str) -> str | None:
        """A package's exact version; ``None`` if it is not pinned."""
        found = self.requirement(package)
        return found.pinned if found else None

    @property
    def versions(self) -> dict[str, str]:
        """Modules and the prefix of their ``__version__``; torch first, because the others import it."""
        pins = {package: self.pin(package) for package in (TORCH, IPEX, BINDING, TRANSFORMERS)}
        return {module_name(package): version for package, version in pins.items() if version}


def module_name(package: str) -> str:
    """The import name of a package."""
    return _BINDING_MODULE if package == BINDING else package.replace("-", "_")


def render_requirements(stack: Stack) -> str:
    """Return the stack's packages and where to find them, for pip; its lock, if there is one."""
    sources = [f"--extra-index-url {index}" for index in stack.indexes]
    sources += [f"--find-links {page}" for page in stack.find_links]
    return "\n".join([*sources, *(stack.lock or stack.python_packages), ""])


def pip_options(stack: Stack) -> str:
    """Return pip's options for the requirements: a lock is complete, with a hash for every file."""
    return "--require-hashes --no-deps" if stack.lock else ""


def render_import_check(stack: Stack) -> str:
    """Return Python code that imports the stack's modules, and fails for a torch that is not for CPUs."""
    modules = ", ".join(stack.versions)
    return f"import {modules}; assert torch.version.cuda is None, torch.__version__"
