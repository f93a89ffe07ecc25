"""Progress reports of long operations: a protocol that the command line implements as a live tree."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol


class Progress(Protocol):
    """Receives nested phases, and notes about the innermost one."""

    def phase(self, title: str) -> AbstractContextManager[None]:
        """Open a phase for a ``with`` block; an exception marks it as failed."""

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
    """The progress of one of several concurrent tasks: its notes start with its name."""

    shared: Progress
    name: str

    def phase(self, title: str) -> AbstractContextManager[None]:
        """Concurrent phases cannot nest, so report the title as a note."""
        self.note(title)
        return nullcontext()

    def note(self, text: str) -> None:
        self.shared.note(f"{self.name}: {text}")
