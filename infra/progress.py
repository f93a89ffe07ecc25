"""How long work reports what it does: a protocol, so that this folder never prints.

The command line implements it with a live tree; tests use :class:`Silent`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol


class Progress(Protocol):
    """Receives phases, which nest, and notes about the innermost one."""

    def phase(self, title: str) -> AbstractContextManager[None]:
        """Open a phase for the duration of a ``with`` block; an exception marks it failed."""

    def note(self, text: str) -> None:
        """Replace the current phase's one-line remark."""


class Silent:
    """Reports nothing."""

    @contextmanager
    def phase(self, title: str) -> Iterator[None]:
        yield

    def note(self, text: str) -> None:
        return None


@dataclass(frozen=True)
class NamedProgress:
    """The progress of one of several that work at the same time: its notes carry its name."""

    shared: Progress
    name: str

    def phase(self, title: str) -> AbstractContextManager[None]:
        """A phase cannot be one of many at a time: it is only noted."""
        self.note(title)
        return nullcontext()

    def note(self, text: str) -> None:
        self.shared.note(f"{self.name}: {text}")
