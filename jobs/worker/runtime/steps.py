"""Reports of training steps: to the metrics file, the user, and the other ranks.

About once a second, the ranks exchange a few bytes, to learn their speed and to agree on when to stop and
when to save a checkpoint. With fast steps, a message per step would cost too much.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from .errors import StoppedError
from .events import Events
from .output import Metrics, StepFigures
from .process import StopRequest
from .ranks import Ranks

TALK_SECONDS = 1.0
_WINDOW = 20
"""Number of messages over which the speed is averaged."""


class RankReport(NamedTuple):
    """A rank's report on the steps since its last report. Only rank 0's ``save`` counts."""

    samples: int
    tokens: int
    busy: float
    """Seconds spent computing, not waiting for other ranks."""
    stop: bool
    save: bool
    next_in: int
    """Steps until the next message."""


class Consensus(NamedTuple):
    """What all ranks know after a message; ``samples`` and ``tokens`` are all ranks' since the last one."""

    samples: int = 0
    tokens: int = 0
    stop: bool = False
    save: bool = False


class Throughput(NamedTuple):
    """The speed of all ranks together; ``eta_seconds`` is the time to the last step."""

    samples_per_second: float
    tokens_per_second: float
    eta_seconds: float


class Mark(NamedTuple):
    """All ranks' progress at one time."""

    time: float
    step: int
    samples: int
    tokens: int


@dataclass
class Pace:
    """This rank's side of the messages. ``hosts`` are the ranks' host names."""

    ranks: Ranks
    hosts: Sequence[str]
    clock: Callable[[], float] = time.perf_counter
    next_talk: int = 0
    shares: dict[str, float] = field(default_factory=dict)
    """Each host's share of the computing power: of the tokens per second of all ranks if none had to wait
    for another."""
    _samples: int = 0
    _tokens: int = 0
    _busy: float = 0.0
    _since: tuple[float, int] | None = None
    _marks: deque[Mark] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    def begin(self, mark_step: int, samples: int, tokens: int) -> None:
        """Start counting; a message follows the first step."""
        now = self.clock()
        self._since = (now, mark_step)
        self._marks.append(Mark(now, mark_step, samples, tokens))
        self.next_talk = mark_step + 1

    def count(self, samples: int, tokens: int, busy: float) -> None:
        """Add one step of this rank."""
        self._samples += samples
        self._tokens += tokens
        self._busy += busy

    def talk(self, step: int, *, stop: bool, save: bool) -> Consensus:
        """Exchange reports. All ranks must call it, after the same step."""
        assert self._since is not None
        now = self.clock()
        before, first = self._since
        one = (now - before) / max(1, step - first)
        next_in = how_many(TALK_SECONDS, one, 1, 1000)
        own = RankReport(self._samples, self._tokens, self._busy, stop, save, next_in)
        reports: list[RankReport] = self.ranks.gather(own)
        self._samples, self._tokens, self._busy, self._since = 0, 0, 0.0, (self.clock(), step)
        self.next_talk = step + reports[0].next_in
        self.shares = host_shares(self.hosts, reports)
        samples = sum(each.samples for each in reports)
        tokens = sum(each.tokens for each in reports)
        return Consensus(samples, tokens, any(each.stop for each in reports), reports[0].save)

    def pause(self, seconds: float) -> None:
        """Leave a time without steps, which has just passed, out of the speed."""
        if self._since is not None:
            self._since = (self._since[0] + seconds, self._since[1])
        marks = [each._replace(time=each.time + seconds) for each in self._marks]
        self._marks = deque(marks, maxlen=_WINDOW)

    def mark(self, step: int, samples: int, tokens: int) -> None:
        """Record all ranks' progress after a message."""
        self._marks.append(Mark(self.clock(), step, samples, tokens))

    def speed(self, total: int) -> Throughput:
        """Return the latest speed; valid after the first mark."""
        first, last = self._marks[0], self._marks[-1]
        seconds = max(last.time - first.time, 1e-9)
        left = (total - last.step) * seconds / max(1, last.step - first.step)
        return Throughput(
            round((last.samples - first.samples) / seconds, 2),
            round((last.tokens - first.tokens) / seconds, 1),
            round(left, 1),
        )


def how_many(seconds: float, one: float, least: int, most: int) -> int:
    """Return how many steps of ``one`` seconds each fit into the time, within bounds."""
    return max(least, min(most, int(seconds / max(one, 1e-6))))


def host_shares(hosts: Sequence[str], reports: Sequence[RankReport]) -> dict[str, float]:
    """Return each host's share of the throughput without waiting; the sum is 1."""
    speeds = dict.fromkeys(hosts, 0.0)
    for host, report in zip(hosts, reports, strict=True):
        speeds[host] += (report.tokens or report.samples) / max(report.busy, 1e-9)
    whole = sum(speeds.values())
    return {host: round(speed / whole, 4) for host, speed in speeds.items()} if whole else {}


@dataclass
class StepReporter:
    """Reports the steps after step ``done``. ``samples`` and ``tokens`` count those of all ranks."""

    events: Events
    metrics: Metrics
    pace: Pace
    request: StopRequest
    total: int
    per_epoch: int
    done: int = 0
    samples: int = 0
    tokens: int = 0
    _begin: float = field(default_factory=time.perf_counter)
    _last: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.metrics.begin(self.done)
        self.pace.begin(self.done, self.samples, self.tokens)

    def step(self, *, loss: float, samples: int, tokens: int = 0, lr: float = 0.0) -> None:
        """Report this rank's next step. ``loss`` is the mean of all ranks.

        All ranks must call it. Raises :class:`StoppedError` on all of them after a SIGTERM.
        """
        now = time.perf_counter()
        step, seconds = self.done + 1, now - self._begin
        figures = StepFigures(step, seconds, loss, lr, samples, tokens, tokens, {})
        if self.take(figures, now - self._last).stop:
            self.stop()
        self._last = time.perf_counter()

    def take(
        self, figures: StepFigures, busy: float, *, talk: bool = False, save: bool = False
    ) -> Consensus:
        """Report one step, ``busy`` seconds of which this rank computed.

        The ranks exchange messages when due, after the last step, and when ``talk`` is true on all of
        them. ``save`` requests a checkpoint.
        """
        self.done, agreed = figures.step, Consensus()
        self.metrics.add(figures)
        self.pace.count(figures.samples, figures.tokens, busy)
        if talk or figures.step >= self.pace.next_talk or figures.step == self.total:
            agreed = self.pace.talk(figures.step, stop=self.request.stop, save=save)
            # The ranks' numbers differ: the last batch may be incomplete, a rank may be missing.
            self.samples += agreed.samples
            self.tokens += agreed.tokens
            self.pace.mark(figures.step, self.samples, self.tokens)
        self.events.step(
            figures.step,
            self.total,
            epoch=round(figures.step / self.per_epoch, 3),
            loss=round(figures.loss, 5),
            lr=figures.lr,
            **self.pace.speed(self.total)._asdict(),
            shares=self.pace.shares,
        )
        return agreed

    def stop(self, checkpoint: str = "") -> NoReturn:
        """Announce the stop that all ranks agreed on. Raises :class:`StoppedError`."""
        self.events.emit("stopped", step=self.done, total=self.total, checkpoint=checkpoint)
        raise StoppedError(f"stopped after step {self.done} of {self.total}")
