"""How fast all ranks are, which of them wants to stop, and when rank 0 wants a checkpoint.

The ranks agree on such things by messages of a few bytes. They send them about once a second, not
with every step, which on fast steps would cost more than it tells.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..runtime.ranks import Ranks

TALK_SECONDS = 1.0
_WINDOW = 20
"""Messages over which the speed is averaged."""


class Told(NamedTuple):
    """What a rank says of the steps since it last spoke; what rank 0 wishes counts for all."""

    tokens: int
    busy: float
    """Seconds in which it computed, rather than waited for the others."""
    stop: bool
    save: bool
    next_in: int
    """Steps until the next message."""


class Agreed(NamedTuple):
    """What all ranks know after a message."""

    tokens: int
    stop: bool
    save: bool


class Speed(NamedTuple):
    """Of all ranks together; ``eta_seconds`` is until the last step."""

    samples_per_second: float
    tokens_per_second: float
    eta_seconds: float


class Mark(NamedTuple):
    """What was done until a moment."""

    time: float
    step: int
    samples: int
    tokens: int


@dataclass
class Pace:
    """This rank's part in the messages, and what they tell of the others.

    ``hosts`` are the ranks' host names.
    """

    ranks: Ranks
    hosts: Sequence[str]
    clock: Callable[[], float] = time.perf_counter
    next_talk: int = 0
    shares: dict[str, float] = field(default_factory=dict)
    """Each host's part of the computing power: how many of all ranks' tokens its ranks would do in
    a second if none had to wait for another."""
    _tokens: int = 0
    _busy: float = 0.0
    _since: tuple[float, int] | None = None
    _marks: deque[Mark] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    def begin(self, mark_step: int, samples: int, tokens: int) -> None:
        """Count from here; the first step is followed by a message."""
        now = self.clock()
        self._since = (now, mark_step)
        self._marks.append(Mark(now, mark_step, samples, tokens))
        self.next_talk = mark_step + 1

    def count(self, tokens: int, busy: float) -> None:
        """Take one step of this rank."""
        self._tokens += tokens
        self._busy += busy

    def talk(self, step: int, *, stop: bool, save: bool) -> Agreed:
        """Tell the others what was counted since the last time; all ranks, after the same step."""
        assert self._since is not None
        now = self.clock()
        before, first = self._since
        one = (now - before) / max(1, step - first)
        own = Told(self._tokens, self._busy, stop, save, steps_until_next(one))
        said: list[Told] = self.ranks.gather(own)
        self._tokens, self._busy, self._since = 0, 0.0, (self.clock(), step)
        self.next_talk = step + said[0].next_in
        self.shares = host_shares(self.hosts, said)
        tokens = sum(told.tokens for told in said)
        return Agreed(tokens, any(told.stop for told in said), said[0].save)

    def mark(self, step: int, samples: int, tokens: int) -> None:
        """Remember what was done until now, after a message."""
        self._marks.append(Mark(self.clock(), step, samples, tokens))

    def speed(self, total: int) -> Speed:
        """The latest speed; after the first mark beyond the beginning."""
        first, last = self._marks[0], self._marks[-1]
        seconds = max(last.time - first.time, 1e-9)
        left = (total - last.step) * seconds / max(1, last.step - first.step)
        return Speed(
            round((last.samples - first.samples) / seconds, 2),
            round((last.tokens - first.tokens) / seconds, 1),
            round(left, 1),
        )


def steps_until_next(one: float) -> int:
    """How many steps of so many seconds make the time from message to message."""
    return max(1, min(1000, int(TALK_SECONDS / max(one, 1e-6))))


def host_shares(hosts: Sequence[str], said: Sequence[Told]) -> dict[str, float]:
    """Each host's part of what all ranks could do without waiting; together 1."""
    speeds = dict.fromkeys(hosts, 0.0)
    for host, told in zip(hosts, said, strict=True):
        speeds[host] += told.tokens / max(told.busy, 1e-9)
    whole = sum(speeds.values())
    return {host: round(speed / whole, 4) for host, speed in speeds.items()} if whole else {}
