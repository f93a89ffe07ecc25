"""Stacks as data: each file beside this one names what a node's software is made of."""

from __future__ import annotations

import sys
from importlib import resources

from pydantic import BaseModel, ConfigDict

from infra.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class Stack(BaseModel):
    """A matched set of software. ``versions`` maps modules to what their ``__version__`` begins with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    summary: str
    ubuntu: str
    backend: str
    use_ipex: bool
    indexes: tuple[str, ...]
    system_packages: tuple[str, ...]
    python_packages: tuple[str, ...]
    versions: dict[str, str]


def stack_names() -> tuple[str, ...]:
    """The stacks that ship with the tool."""
    files = resources.files(__name__).iterdir()
    return tuple(sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml")))


def load_stack(name: str) -> Stack:
    """A stack by its name; raises :class:`UsageError` where there is none."""
    if name not in stack_names():
        raise UsageError(f"unknown stack {name!r}: one of {', '.join(stack_names())}")
    text = resources.files(__name__).joinpath(f"{name}.toml").read_text()
    return Stack(name=name, **tomllib.loads(text))
