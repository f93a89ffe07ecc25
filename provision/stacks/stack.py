"""A stack: everything that a node's software is made of, as one value."""

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
    """A matched set of software. ``indexes`` are asked besides PyPI, ``find_links`` are pages of links."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    summary: str
    ubuntu: str
    python: str
    """The release's own ``python3``, which the node's environment is made with."""
    launcher: Literal["mpirun"] = "mpirun"
    backend: Literal["ccl", "gloo"]
    use_ipex: bool
    indexes: tuple[str, ...]
    find_links: tuple[str, ...] = ()
    system_packages: tuple[str, ...]
    python_packages: tuple[str, ...]
    pip: str = ""
    """The pip to install with, where the release's own is too old for today's wheels."""
    environment: dict[str, str] = {}
    """What every rank of a job finds in its environment; nothing of it is in the image."""
    examples: str = ""
    """A source archive of transformers, whose examples for question answering are kept on the nodes."""
    lock: tuple[str, ...] = ()
    """Every package with its version and hashes, as lines for pip; empty where nodes resolve themselves."""

    def requirement(self, package: str) -> Requirement | None:
        """What the stack asks of a package, by its name as PyPI writes it."""
        for text in self.python_packages:
            found = parse_requirement(text)
            if found and found.name == package:
                return found
        return None

    def pin(self, package: str) -> str | None:
        """A package's exact version; ``None`` where it is not pinned to one."""
        found = self.requirement(package)
        return found.pinned if found else None

    @property
    def versions(self) -> dict[str, str]:
        """Modules, and what their ``__version__`` begins with; torch first, which others need."""
        pins = {package: self.pin(package) for package in (TORCH, IPEX, BINDING, TRANSFORMERS)}
        return {
            module_name(package, version): version for package, version in pins.items() if version
        }


def module_name(package: str, version: str) -> str:
    """What a package is imported as: https://github.com/intel/torch-ccl renamed its own in 1.12."""
    return binding_module(version) if package == BINDING else package.replace("-", "_")
