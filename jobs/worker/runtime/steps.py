"""Reports of training steps: to the metrics file, to the other ranks, and to the user."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NoReturn

from .errors import StoppedError
from .events import Events
from .metrics import Metrics, StepFigures
from .pace import Consensus, Pace
from .stopping import StopRequest


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

        The ranks exchange messages when that is due, after the last step, and, if ``talk`` is true on
        all of them, now. ``save`` is a request for a checkpoint.
        """
        self.done, agreed = figures.step, Consensus()
        self.metrics.add(figures)
        self.samples += figures.samples * self.pace.ranks.size
        self.pace.count(figures.tokens or figures.samples, busy)
        if talk or figures.step >= self.pace.next_talk or figures.step == self.total:
            agreed = self.pace.talk(figures.step, stop=self.request.stop, save=save)
            self.tokens += agreed.tokens if figures.tokens else 0
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
