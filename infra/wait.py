"""Waiting, in one place: the only sleep of the whole tool is here."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from infra.errors import DeadlineError

T = TypeVar("T")

# Bare metal can take over 20 minutes to start, and images of large volumes have taken over 50.
BOOT_DEADLINE_S = 40 * 60
IMAGE_DEADLINE_S = 90 * 60
TERMINATE_DEADLINE_S = 20 * 60
# EC2 shows what was just created or deleted with a delay of seconds.
CONSISTENCY_DEADLINE_S = 2 * 60
# So what an interrupted command made is looked for twice, this far apart, before it is called gone.
SETTLE_S = 10.0


class Clock(Protocol):
    """Time as an argument, so that a test can let an hour pass at once."""

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's own time."""

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


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

    Pauses start at a quarter of a second and double up to ``every_s``. ``on_wait`` is told the
    seconds passed so far. Raises :class:`DeadlineError` after ``deadline_s`` seconds.
    """
    clock = clock or SystemClock()
    start, pause = clock.monotonic(), 0.25
    while (found := probe()) is None:
        passed = clock.monotonic() - start
        if passed >= deadline_s:
            limit = f"{deadline_s / 60:.0f} min" if deadline_s >= 60 else f"{deadline_s:.0f} s"
            raise DeadlineError(f"{what}: not within {limit}")
        if on_wait:
            on_wait(passed)
        clock.sleep(min(pause, every_s, deadline_s - passed + 0.01))
        pause *= 2
    return found
