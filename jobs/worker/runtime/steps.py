"""Reports of training steps: to the metrics file, the user, and the other ranks.

After each step, the ranks exchange a few bytes: their losses, their speed, and whether to stop or to save a
checkpoint. No rank waits for them: a step is reported when the next one has been taken.
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

MARK_SECONDS = 1.0
_WINDOW = 20
"""Number of marks over which the speed is averaged."""


class RankReport(NamedTuple):
    """A rank's loss of one step, and its sums since training began. Only rank 0's ``save`` counts."""

    loss: float = 0.0
    stop: float = False
    save: float = False
    samples: float = 0
    tokens: float = 0
    busy: float = 0.0
    """Seconds spent computing, not waiting for other ranks."""


class Consensus(NamedTuple):
    """What all ranks agree on."""

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
    reports: Sequence[RankReport]

    @property
    def samples(self) -> int:
        return int(sum(each.samples for each in self.reports))

    @property
    def tokens(self) -> int:
        return int(sum(each.tokens for each in self.reports))


@dataclass
class Pace:
    """The speed of all ranks, on ``hosts`` by rank."""

    ranks: Ranks
    hosts: Sequence[str]
    clock: Callable[[], float] = time.perf_counter
    _own: RankReport = field(default_factory=RankReport)
    _marks: deque[Mark] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    def begin(self, step: int) -> None:
        """Start counting after a step."""
        self._marks.append(Mark(self.clock(), step, [self._own] * self.ranks.size))

    def send(
        self, figures: StepFigures, busy: float, *, stop: bool, save: bool
    ) -> Callable[[], Mark]:
        """Start to exchange reports on a step; return a function that waits for them.

        All ranks must call both in the same order.
        """
        own = self._own
        sums = own.samples + figures.samples, own.tokens + figures.tokens, own.busy + busy
        self._own = RankReport(figures.loss, stop, save, *sums)
        now, receive = self.clock(), self.ranks.gather_later(self._own)
        return lambda: Mark(now, figures.step, [RankReport(*each) for each in receive()])

    def pause(self, seconds: float) -> None:
        """Leave a time without steps, which has just passed, out of the speed."""
        marks = [each._replace(time=each.time + seconds) for each in self._marks]
        self._marks = deque(marks, maxlen=_WINDOW)

    def mark(self, mark: Mark) -> None:
        """Add all ranks' progress; of marks within a second, the last one remains."""
        last, *before = reversed(self._marks)
        if before and last.time - before[0].time < MARK_SECONDS:
            self._marks.pop()
        self._marks.append(mark)

    @property
    def shares(self) -> dict[str, float]:
        """Each host's share of the computing power in the last seconds: of the tokens per second of all
        ranks if none had to wait for another."""
        return host_shares(self.hosts, self._marks[-min(3, len(self._marks))], self._marks[-1])

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


def host_shares(hosts: Sequence[str], first: Mark, last: Mark) -> dict[str, float]:
    """Return each host's share of the throughput without waiting between two marks; the sum is 1."""
    speeds = dict.fromkeys(hosts, 0.0)
    for host, a, b in zip(hosts, first.reports, last.reports, strict=True):
        speeds[host] += (b.tokens - a.tokens or b.samples - a.samples) / max(b.busy - a.busy, 1e-9)
    whole = sum(speeds.values())
    return {host: round(speed / whole, 4) for host, speed in speeds.items()} if whole else {}


@dataclass
class StepReporter:
    """Reports the steps after step ``done``. ``samples`` and ``tokens`` count those of all ranks.

    ``check`` sees each step's figures, with the mean loss of all ranks, and returns those to report.
    """

    events: Events
    metrics: Metrics
    pace: Pace
    request: StopRequest
    check: Callable[[StepFigures], StepFigures]
    total: int
    per_epoch: int
    done: int
    samples: int
    tokens: int
    _sent: deque[tuple[StepFigures, Callable[[], Mark]]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.metrics.begin(self.done)
        self.pace.begin(self.done)
        self._before = self.samples, self.tokens

    def take(self, figures: StepFigures, busy: float, *, now: bool, save: bool) -> Consensus:
        """Take one step's figures, with this rank's loss; it computed for ``busy`` seconds of the step.

        They are reported at the next step; immediately after the last step, if the ranks agree on anything,
        and with ``now``, which must be the same on all ranks. ``save`` requests a checkpoint.
        """
        send = self.pace.send(figures, busy, stop=self.request.stop, save=save)
        self._sent.append((figures, send))
        agreed = self._report() if len(self._sent) > 1 else Consensus()
        if now or any(agreed) or figures.step == self.total:
            rest = self.finish()
            agreed = Consensus(agreed.stop or rest.stop, agreed.save or rest.save)
        return agreed

    def finish(self) -> Consensus:
        """Report the last step now."""
        return self._report() if self._sent else Consensus()

    def _report(self) -> Consensus:
        figures, receive = self._sent.popleft()
        mark = receive()
        mean = sum(each.loss for each in mark.reports) / len(mark.reports)
        figures = self.check(figures._replace(loss=mean))
        self.pace.mark(mark)
        # The ranks' numbers differ: the last batch may be incomplete, a rank may be missing.
        samples, tokens = self._before
        self.done = mark.step
        self.samples, self.tokens = samples + mark.samples, tokens + mark.tokens
        self.metrics.add(figures)
        self.events.step(
            figures.step,
            self.total,
            epoch=round(figures.step / self.per_epoch, 3),
            loss=round(figures.loss, 5),
            lr=figures.lr,
            **self.pace.speed(self.total)._asdict(),
            shares=self.pace.shares,
        )
        return Consensus(any(each.stop for each in mark.reports), bool(mark.reports[0].save))

    def stop(self, checkpoint: str = "") -> NoReturn:
        """Announce the stop that all ranks agreed on. Raises :class:`StoppedError`."""
        self.events.emit("stopped", step=self.done, total=self.total, checkpoint=checkpoint)
        raise StoppedError(f"stopped after step {self.done} of {self.total}")
