"""Why a rank's piece of work ends early. Runs on Python 3.8."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Timer
from typing import Any

from ..runtime.process import STOPPED

SOON_S, PAUSE_S = 5.0, 0.2


@dataclass
class Stop:
    """Whether SIGTERM has come or the time is over, and the process that either ends."""

    end: Callable[[Any], object] = lambda process: process.kill()
    requested: bool = False
    expired: bool = False
    process: Any = None

    def on_signal(self, *_: object) -> None:
        self.requested = True
        self.kill()

    def expire_after(self, seconds: float) -> None:
        """End the work when so much time has passed."""
        timer = Timer(seconds, self._expire)
        timer.daemon = True
        timer.start()

    def _expire(self) -> None:
        self.expired = True
        self.kill()

    def kill(self) -> None:
        """End the process, if one is running."""
        if self.process is not None:
            self.end(self.process)

    def watch(self, process: Any) -> None:
        """End this process when work is to end."""
        self.process = process
        if self.requested or self.expired:
            self.kill()

    def has_ended(self, code: int) -> bool:
        """Return whether a process that failed with this code did so because it was to end."""
        # By its own handler, or before it had one.
        by_signal = code in (STOPPED, -signal.SIGTERM) and self.comes()
        return by_signal or self.requested or self.expired

    def comes(self) -> bool:
        """Return whether SIGTERM has come, or comes soon: others may get it first."""
        until = time.monotonic() + SOON_S
        while not self.requested and time.monotonic() < until:
            time.sleep(PAUSE_S)
        return self.requested
