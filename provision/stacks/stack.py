"""A stack: all of a node's software as one value."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from provision.stacks.oneccl import binding_module
from provision.stacks.versions import Requirement, parse_requirement

TORCH = "torch"
IPEX = "intel-extension-for-pytorch"
BINDING = "oneccl-bind-pt"
TRANSFORMERS = "transformers"
MPI = "impi-rt"


class Stack(BaseModel):
    """A matched set of software. ``indexes`` are searched besides PyPI; ``find_links`` are pages of links."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    summary: str
    ubuntu: str
    python: str
    """The release's own ``python3``, which runs the node's environment."""
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
        """Return the backend of communication that is asked for; for ``auto`` the stack's own."""
        return self.backend if backend == "auto" else backend

    def pin(self, package: str) -> str | None:
        """A package's exact version; ``None`` if it is not pinned."""
        found = self.requirement(package)
        return found.pinned if found else None

    @property
    def versions(self) -> dict[str, str]:
        """Modules, and what their ``__version__`` begins with; torch first, which the others import."""
        pins = {package: self.pin(package) for package in (TORCH, IPEX, BINDING, TRANSFORMERS)}
        return {
            module_name(package, version): version for package, version in pins.items() if version
        }


def module_name(package: str, version: str) -> str:
    """The import name of a package."""
    return binding_module(version) if package == BINDING else package.replace("-", "_")
