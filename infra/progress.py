"""How long work reports what it does: a protocol, so that this folder never prints.

The command line implements it with a live tree; tests use :class:`Silent`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
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
