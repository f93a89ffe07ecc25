"""Evaluation while training: when, how, and which model is the best so far.

The best weights are in rank 0's memory and part of each checkpoint, so a resumed run has them as well.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from ..runtime.errors import TrainingError
from ..runtime.events import Events
from ..runtime.output import save_json
from .batches import Schedule, TrainingRun
from .checkpoints import frozen_weights, trained_weights
from .options import TrainOptions
from .state import (
    State,
    TrainContext,
    TrainingProgress,
    random_state,
    set_random_state,
    share_tensors,
)
from .task import FILES, Loaded, Samples, pick_scores

MOST_SHARE = 0.1
"""By default, evaluation takes at most this share of the training time."""
COST = 1 / 3
"""A token's cost in evaluation, as a share of that in training, which also has a backward pass."""

Scores = Mapping[str, float]


@dataclass(frozen=True)
class Unseen:
    """The data for evaluation while training."""

    records: Sequence[Any]
    samples: Samples
    is_other: bool
    """Whether the model is not trained on them."""


class Final(NamedTuple):
    """An evaluation: its figures, and this rank's events."""

    figures: dict[str, Any]
    events: Sequence[tuple[str, Mapping[str, Any]]]


def evaluate_quietly(run: TrainingRun, loaded: Loaded, unseen: Unseen) -> Final:
    """Evaluate a model without leaving anything in the output folder, or remarks in the log."""
    context = run.context
    said: list[tuple[str, Mapping[str, Any]]] = []
    with TemporaryDirectory() as name:
        events = Events(context.ranks.rank, StringIO())
        events.observe = lambda *event: said.append(event)
        quiet = replace(context, output=Path(name), events=events)
        return Final(run.task.evaluate(quiet, loaded, unseen.records, unseen.samples), said)


@dataclass
class Evaluator:
    """Evaluates a run on all ranks after every ``every`` steps; 0 for never."""

    run: TrainingRun
    unseen: Unseen
    every: int
    total: int
    final: Final | None = None

    @property
    def options(self) -> TrainOptions:
        return self.run.context.options

    def is_due(self, progress: TrainingProgress) -> bool:
        """Return whether to evaluate now, between two steps; the same on every rank."""
        step = progress.step
        done = bool(progress.evaluations) and progress.evaluations[-1]["step"] >= step
        return (
            bool(self.every and step) and not done and not (step % self.every and step < self.total)
        )

    def best(self, progress: TrainingProgress) -> Scores | None:
        """Return the best scores so far, with their ``step``.

        The other scores decide between equal ones, and then the step: the first is the best.
        """
        if not progress.evaluations:
            return None
        metrics, metric = self.options.metrics, self.metric(progress)
        signs = {name: -1 if metrics[name] == "min" else 1 for name in (metric, *metrics)}

        def rank(each: Scores) -> list[float]:
            return [sign * each[name] for name, sign in signs.items() if name in each]

        return max(progress.evaluations, key=rank)

    def metric(self, progress: TrainingProgress) -> str:
        """Return the score that chooses the best model: ``--metric``, or the first one that the data have.

        Raises :class:`TrainingError` if the data have no such score.
        """
        (first, *_), wanted = progress.evaluations, self.options.metric
        for name in [wanted] if wanted else self.options.metrics:
            if name in first:
                return name
        scores = ", ".join(name for name in first if name != "step")
        raise TrainingError(f"--metric {wanted}: these data have no such score, only {scores}")

    def is_exhausted(self, progress: TrainingProgress) -> bool:
        """Return whether the last ``--patience`` evaluations found nothing better."""
        patience, best = self.options.patience, self.best(progress)
        if patience is None or best is None:
            return False
        return sum(each["step"] > best["step"] for each in progress.evaluations) >= patience

    def evaluate(self, progress: TrainingProgress, state: State) -> float:
        """Add the scores of the model as trained so far; keep its weights if they are the best.

        Returns the seconds that this took. The state of random numbers is as before.
        """
        begin, context = time.perf_counter(), self.run.context
        # The supervisor must not take a long evaluation for a hang.
        context.events.emit("evaluating", step=progress.step, total=self.total)
        scores = self._measure(context, is_final=progress.step == self.total)
        progress.evaluations.append({"step": progress.step, **scores})
        best = self.best(progress)
        assert best is not None
        is_best = best["step"] == progress.step
        if is_best and self.options.keep == "best" and context.ranks.first:
            state.best.update(
                (name, each.detach().clone()) for name, each in trained_weights(state.model).items()
            )
        seconds = time.perf_counter() - begin
        metric = self.metric(progress)
        context.events.emit(
            "evaluation",
            step=progress.step,
            total=self.total,
            metric=metric,
            score=scores[metric],
            best=is_best,
            best_score=best[metric],
            best_step=best["step"],
            seconds=round(seconds, 3),
            scores=scores,
        )
        return seconds

    def _measure(self, context: TrainContext, *, is_final: bool) -> dict[str, float]:
        loaded, random = self.run.loaded, random_state()
        loaded.model.eval()
        final = evaluate_quietly(self.run, loaded, self.unseen)
        if is_final:
            self.final = final
        loaded.model.train()
        set_random_state(random)
        scores: dict[str, float] = context.ranks.share(pick_scores(final.figures))
        return scores

    def evaluate_model(self, progress: TrainingProgress) -> dict[str, Any]:
        """Return the figures of the trained model, with its predictions in the output folder."""
        context, final = self.run.context, self.final
        if final is None or progress.model_step != self.total:
            figures = self.run.task.evaluate(
                context, self.run.loaded, self.unseen.records, self.unseen.samples
            )
        else:
            figures = final.figures
            for event, fields in final.events:
                context.events.emit(event, **fields)
        for name in FILES:
            if context.ranks.first and name in figures:
                save_json(context.output / f"{name}.json", figures[name])
        return figures

    def take_best(self, progress: TrainingProgress, state: State) -> None:
        """Give all ranks the best weights, unless ``--keep last``, at the end of the training."""
        best, note = self.best(progress), self.run.context.events.note
        progress.model_step = progress.step
        if best is not None and self.is_exhausted(progress):
            note(
                f"training ended after step {progress.step} of {self.total}: none of the last "
                f"{self.options.patience} evaluations was better than that of step {best['step']}"
            )
        if best is None or self.options.keep == "last" or best["step"] == progress.step:
            return
        weights = share_tensors(dict(state.best), self.run.context.ranks)
        state.model.load_state_dict({**frozen_weights(state.model), **weights})
        progress.model_step = int(best["step"])
        note(f"the model is that of step {best['step']}, the best one")


def plan_evaluation(run: TrainingRun, unseen: Unseen, schedule: Schedule) -> Evaluator:
    """Return when to evaluate, with notes about the choice."""
    options, note = run.context.options, run.context.events.note
    wanted, every = options.eval_every, 0
    if wanted.isdecimal():
        every = int(wanted)
    elif options.asks_for_evaluations:
        every = schedule.per_epoch
    elif wanted == "auto" and unseen.is_other and options.metrics and options.epochs:
        # By tokens: ranks must agree, and a resumed run must decide the same.
        share = COST * run.task.evaluation_tokens(unseen.samples) / max(int(run.lengths.sum()), 1)
        if schedule.total <= schedule.per_epoch:
            note("no evaluation while training: there is only one epoch")
        elif share > MOST_SHARE:
            note(
                f"no evaluation while training: it would take about {100 * share:.0f} % of the time; "
                "`--eval-every epoch` does it anyway"
            )
        else:
            every = schedule.per_epoch
            note(f"evaluation after each epoch, in about {100 * share:.1f} % of the time")
    return Evaluator(run, unseen, every, schedule.total)
