"""The end of the cluster's time to live, before which a job saves a checkpoint and ends."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .commands import ask

_SHOW = ["sudo", "-n", "sh", "/run/spr-cluster/expiry", "show"]
_ASK_S = 10.0
_SHARE, _LEAST_S, _MOST_S = 1 / 8, 20.0, 300.0
_CHECKPOINTS = 3
SAVE_S = 120.0
"""Time to save a checkpoint after --max-time."""


def show_lifetime() -> str:
    """Return what the node's guard prints about its lifetime; "" if there is none."""
    return ask(_SHOW, _ASK_S, stderr=subprocess.DEVNULL) or ""


def parse_deadline(text: str, *, until_done: bool) -> float | None:
    """Return a job's deadline from ``D LATEST GRACE_S``, or from ``D`` of an older node. Pure."""
    words = text.split()
    if len(words) not in (1, 3) or not all(word.isdecimal() for word in words):
        return None
    expires, latest, grace = [*map(float, words), *[float(words[0]), 0.0][: 3 - len(words)]]
    return max(expires, latest - grace) if until_done else expires


def lead_before(deadline: float, began: float, checkpoint_s: float = 0.0) -> float:
    """Return how long before the deadline a job stops that takes this long for a checkpoint. Pure."""
    share = min(max((deadline - began) * _SHARE, _LEAST_S), _MOST_S)
    return max(share, _CHECKPOINTS * checkpoint_s)


@dataclass
class DeadlineWatch:
    """Asks for the deadline every few seconds in a thread, because `extend` may move it."""

    until_done: bool = False
    show: Callable[[], str] = show_lifetime
    deadline: float | None = None
    began: float = field(default_factory=time.time)
    max_time_s: float = 0.0
    """The job's own limit, since ``first``, its first start; 0 for none."""
    first: float = field(default_factory=time.time)
    _unless: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Find the deadline, and keep looking."""
        self._look()
        threading.Thread(target=self._watch, daemon=True).start()

    def find_end(self, checkpoint_s: float = 0.0) -> dict[str, Any]:
        """Return the deadline as the reason to stop now; {} if there is time left.

        ``until`` is when the ranks are killed.
        """
        limit = self.first + self.max_time_s
        if self.max_time_s and time.time() > limit:
            message = f"it took longer than --max-time, {self.max_time_s / 60:g} min"
            return {"message": message, "limit": True, "until": limit + SAVE_S}
        at = self.deadline
        if at is None or time.time() < at - lead_before(at, self.began, checkpoint_s):
            return {}
        over = time.strftime("%H:%M UTC", time.gmtime(at))
        return {
            "message": f"the cluster's time to live is over at {over}",
            "deadline": True,
            "until": at,
        }

    def _look(self) -> None:
        found = parse_deadline(self.show(), until_done=self.until_done)
        # A guard that does not answer once has not changed its mind.
        self.deadline = found or self.deadline

    def _watch(self) -> None:
        while not self._unless.wait(_ASK_S):
            self._look()
