"""Polling with a deadline, the only ``sleep`` on the user's machine, and progress reports.

boto3's waiters report no progress, stop at the first network error, discard the machines that did
start if another one fails, and sleep in real time, which tests cannot skip.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, TypeVar

from infra.errors import DeadlineError
from infra.words import spoken_duration

T = TypeVar("T")

# Bare metal can take over 20 minutes to start, and images of large volumes have taken over 50.
BOOT_DEADLINE_S = 40 * 60
IMAGE_DEADLINE_S = 90 * 60
TERMINATE_DEADLINE_S = 20 * 60
# Bare metal has taken an hour to terminate. `up` waits only for the quota or placement group it holds.
END_DEADLINE_S = 60 * 60
DOWN_DEADLINE_S = 100 * 60
# `down` retries a resource that is still in use in its next round instead of waiting longer.
HELD_DEADLINE_S = 20.0
# EC2 shows new and deleted resources with a delay of seconds.
CONSISTENCY_DEADLINE_S = 2 * 60


class Clock(Protocol):
    """The module ``time``, or a clock with which tests skip an hour."""

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


def wait_until(
    what: str,
    probe: Callable[[], T | None],
    *,
    deadline_s: float,
    clock: Clock | None = None,
    every_s: float = 5.0,
    on_wait: Callable[[float], None] | None = None,
) -> T:
    """Call ``probe`` until it returns something other than ``None``, and return that.

    Pauses start at 0.25 s and double up to ``every_s``. ``on_wait`` receives the elapsed seconds.
    Raises :class:`DeadlineError` after ``deadline_s`` seconds.
    """
    clock = clock or time
    start, pause = clock.monotonic(), 0.25
    while (found := probe()) is None:
        passed = clock.monotonic() - start
        if passed >= deadline_s:
            raise DeadlineError(f"{what} timed out after {spoken_duration(deadline_s)}")
        if on_wait:
            on_wait(passed)
        clock.sleep(min(pause, every_s, deadline_s - passed + 0.01))
        pause *= 2
    return found


def start_thread(call: Callable[[], T]) -> Future[T]:
    """Call a function in a thread that does not delay the exit of this process; return its future."""
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class Progress(Protocol):
    """Reports nested phases, and notes about the innermost one."""

    def phase(self, title: str) -> AbstractContextManager[None]:
        """Open a phase for a ``with`` block; an exception marks it as failed."""

    def note(self, text: str) -> None:
        """Replace the current phase's one-line remark."""


class Silent:
    """Reports nothing."""

    def phase(self, title: str) -> AbstractContextManager[None]:
        return nullcontext()

    def note(self, text: str) -> None:
        return None


@dataclass(frozen=True)
class NamedProgress:
    """Progress of one of several concurrent tasks; prefixes each note with the task's name."""

    shared: Progress
    name: str

    def phase(self, title: str) -> AbstractContextManager[None]:
        """Report the title as a note, because concurrent phases cannot nest."""
        self.note(title)
        return nullcontext()

    def note(self, text: str) -> None:
        self.shared.note(f"{self.name}: {text}")
