"""Which trial runs next, which one ends early, and the best model so far: rank 0's side of a study.

Optuna proposes the options of each trial, and its journal has all of them:

output.state/study/
    journal      Optuna's journal of the study
    best/        the output folder of the best trial, with its metrics
    new-7/       that of a trial that is about to replace it

A trial's end is followed by a checkpoint, ``output.state/checkpoints/step-N`` after N trials, with the
journal and the best trial's output. It is copied, stored, and fetched as those of other jobs, so a study
continues after the loss of any node.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from ..runtime.checkpoint_names import CHECKPOINTS, LAST, checkpoint_name, newest, step_of
from ..runtime.errors import first_line
from ..runtime.events import Events
from ..runtime.output import METRICS, RESULTS, save_json
from ..supervisor.launch import FIRST, LAUNCH
from ..tasks import format_score
from ..training.options import TrainOptions, flag
from .plan import OWN_METRICS, STUDY, Domain, StudyPlan

JOURNAL, BEST = "journal", "best"
_KEPT = 2
_FACTOR = 3
"""Of the trials that reach an evaluation, the best third continues, at the first, third, ninth, and so on."""
_DRAWS = 20
"""A study ends if so many proposals are trials that have been made."""
_PAUSE = 10
"""Time between checkpoints, as a multiple of the time that one takes: its copies take longer."""
_LEAD_S = 60.0
"""Before the job's limit, the trials end, so that the best one becomes the job's."""
_FAILURES = 3
"""A study ends if so many trials, and one on each rank, fail before the first one succeeds."""


def _read_limit() -> float:
    """Return the job's time limit in seconds; 0 for none."""
    with suppress(OSError, ValueError, KeyError):
        return float(json.loads(Path(LAUNCH).read_text())["spec"]["ending"]["max_time_s"])
    return 0.0


@dataclass
class Coordinator:
    """A study in the folder ``state``. Its methods take and return what JSON can hold.

    Only one thread may use it.
    """

    SERVED: ClassVar = ("ask", "report", "is_better", "tell", "warn", "is_over", "join")

    plan: StudyPlan
    options: TrainOptions
    state: Path
    events: Events
    ranks: int = 1
    hosts: dict[int, str] = field(default_factory=dict)
    """The hosts of the ranks that have come."""
    _dismissed: int = 0
    _running: dict[int, Any] = field(default_factory=dict)
    _warnings: set[str] = field(default_factory=set)
    _begin: float = field(default_factory=time.monotonic)
    _pauses_until: float = 0.0

    def __post_init__(self) -> None:
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # An interrupted trial has the evaluations of its first run.
        warnings.filterwarnings("ignore", "The reported value is ignored")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        wanted = self.options.metric
        self._metrics = [wanted] if wanted else list(self.options.metrics)
        best = self.options.metrics[self._metrics[0]]
        self._sign = 1 if best == "max" else -1
        self.folder.mkdir(parents=True, exist_ok=True)
        storage = JournalStorage(JournalFileBackend(str(self.folder / JOURNAL)))
        is_new = not (self.folder / JOURNAL).stat().st_size
        pruner: Any = optuna.pruners.SuccessiveHalvingPruner(1, _FACTOR)
        self.study = optuna.create_study(
            storage=storage,
            pruner=pruner if self._is_comparable() else optuna.pruners.NopPruner(),
            study_name="study",
            direction=f"{best}imize",
            load_if_exists=True,
        )
        self._ended_before = {each.number for each in self.ended()}
        # After a resume, others than it has proposed before.
        seed = self.options.seed + len(self.study.get_trials(deepcopy=False))
        # With constant_liar, a trial that still runs keeps its neighbors from the same place.
        self.study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        if is_new:
            every = self.plan.combinations() if self.plan.size <= self.plan.trials else []
            # Neighbors are alike: if the worst come first, too many of the others continue.
            random.Random(self.options.seed).shuffle(every)
            for each in every:
                self.study.enqueue_trial(each)
        # Interrupted trials run again, and count once among those that reached an evaluation.
        running = self._in_state(TrialState.RUNNING)
        self._interrupted = [optuna.Trial(self.study, each._trial_id) for each in running]

    def _is_comparable(self) -> bool:
        """Return whether trials are equally far at the same evaluation."""
        by_step = self.options.eval_every.isdecimal() and "batch_size" in self.plan.tune
        return not by_step and not {"epochs", "max_steps"} & self.plan.tune.keys()

    @property
    def folder(self) -> Path:
        return self.state / STUDY

    def _in_state(self, *states: TrialState) -> list[Any]:
        return self.study.get_trials(deepcopy=False, states=states)

    def ended(self) -> list[Any]:
        """Return the trials that have ended by themselves or were pruned."""
        every = self._in_state(TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
        return [each for each in every if "seconds" in each.user_attrs]

    def ask(self) -> dict[str, Any]:
        """Return the next trial: its ``number`` and ``options``; without any, nothing is left to do."""
        ended = self.ended()
        is_full = len(ended) + len(self._running) >= self.plan.trials
        is_done = is_full or self._is_hopeless(ended) or self._is_late()
        for _ in range(0 if is_done else _DRAWS):
            trial = self._interrupted.pop(0) if self._interrupted else self.study.ask()
            options = {name: _suggest(trial, name, each) for name, each in self.plan.tune.items()}
            if options not in [each.params for each in (*ended, *self._running.values())]:
                self._running[trial.number] = trial
                return {"number": trial.number, "options": options}
            self.study.tell(trial, state=TrialState.FAIL)
        self._dismissed += 1
        return {}

    def _is_hopeless(self, ended: list[Any]) -> bool:
        if len(ended) < max(_FAILURES, self.ranks):
            return False
        return all(each.state == TrialState.FAIL for each in ended)

    def _is_late(self) -> bool:
        if self._dismissed:
            return True  # as another rank was told
        left, complete = self._time_left(), self._in_state(TrialState.COMPLETE)
        longest = max((each.user_attrs["seconds"] for each in complete), default=0.0)
        if left is None or longest < left:
            return False
        limit = _read_limit()
        self.events.note(f"no time for another trial in the job's limit, {limit / 60:.3g} min")
        return True

    def _time_left(self) -> float | None:
        """Return the seconds until the study has to end by itself, before its limit; ``None`` without one."""
        limit = _read_limit()
        end = limit - min(_LEAD_S, limit / 4) - (time.time() - self._first_start())
        return max(end, 0.0) if limit else None

    def _first_start(self) -> float:
        """Return when the job first started, in seconds since 1970; a restart's own start if unknown."""
        with suppress(OSError, ValueError, KeyError):
            return float(json.loads(Path(FIRST).read_text())["first"])
        return time.time() - (time.monotonic() - self._begin)

    def join(self, rank: int, host: str) -> tuple[str, str, float | None]:
        """Take a rank's host.

        Returns that of this process, Slurm's name of its node, "" without Slurm, and the seconds left.
        """
        self.hosts[rank] = host
        if len(self.hosts) == self.ranks:
            hosts = [self.hosts[rank] for rank in sorted(self.hosts)]
            options = self.options
            self.events.emit(
                "start",
                world_size=self.ranks,
                hosts=list(dict.fromkeys(hosts)),
                backend=options.backend,
                dtype=options.dtype,
                model=options.model_name,
                versions={},
            )
        return socket.gethostname(), os.environ.get("SLURMD_NODENAME", ""), self._time_left()

    def is_over(self) -> bool:
        """Return whether every rank knows that nothing is left to do."""
        return self._dismissed >= self.ranks

    def report(self, number: int, evaluation: int, scores: Mapping[str, float]) -> bool:
        """Take the scores of a trial's nth evaluation, from 1; return whether the trial is to end."""
        trial = self._running[number]
        trial.report(scores[self.metric(scores)], evaluation)
        return bool(trial.should_prune())

    def warn(self, text: str) -> None:
        """Tell the user a trial's warning, unless another one had it."""
        if text not in self._warnings:
            self._warnings.add(text)
            self.events.note(text)

    def metric(self, scores: Mapping[str, float]) -> str:
        """Return the name of the score that compares trials: ``--metric``, or the first one there is."""
        return next((name for name in self._metrics if name in scores), self._metrics[0])

    def is_better(self, scores: Mapping[str, float]) -> bool:
        """Return whether a trial with these scores would be the best one so far."""
        best, score = self.best(), scores[self.metric(scores)]
        return best is None or self._sign * score > self._sign * best.value

    def best(self) -> Any:
        """Return the best trial, of equal ones the first to end; ``None`` if none has succeeded."""
        every = sorted(self._in_state(TrialState.COMPLETE), key=lambda each: each.datetime_complete)
        return max(every, key=lambda each: self._sign * each.value, default=None)

    def tell(self, number: int, outcome: Mapping[str, Any]) -> None:
        """Take a trial's end: its ``scores``, its ``failure``, or neither if it was pruned.

        The output of one that :meth:`is_better` said is better is in :attr:`folder` already.
        """
        trial, scores = self._running[number], outcome.get("scores")
        new = self.folder / f"new-{number}"
        if scores and self.is_better(scores):
            shutil.rmtree(self.folder / BEST, ignore_errors=True)
            new.rename(self.folder / BEST)
        shutil.rmtree(new, ignore_errors=True)
        for name, value in outcome.items():
            trial.set_user_attr(name, value)
        if scores:
            self.study.tell(trial, scores[self.metric(scores)])
        else:
            self.study.tell(
                trial, state=TrialState.FAIL if outcome.get("failure") else TrialState.PRUNED
            )
        del self._running[number]
        self._announce(number)
        if time.monotonic() >= self._pauses_until:
            self.save()

    def _announce(self, number: int) -> None:
        trial = self.study.get_trials(deepcopy=False)[number]
        attributes, ended = trial.user_attrs, len(self.ended())
        what = f"pruned after evaluation {trial.last_step}"
        if failure := attributes.get("failure"):
            what = f"failed: {failure}"
        elif scores := attributes.get("scores"):
            metric = self.metric(scores)
            what = f"{metric} {format_score(metric, scores[metric], 2)}"
            what += ", the best so far" if self.best().number == number else ""
        values = {k: f"{v:.3g}" if isinstance(v, float) else v for k, v in trial.params.items()}
        tried = " ".join(f"{flag(name)} {value}" for name, value in values.items())
        self.events.note(
            f"trial {number + 1} ({ended} of {self.plan.trials} have ended): {what} ({tried}; "
            f"{attributes['seconds']:.0f} s on {attributes['host']})"
        )

    def save(self) -> None:
        """Write a checkpoint, and remove older ones."""
        begin, step = time.monotonic(), len(self.ended())
        folder = self.state / CHECKPOINTS
        target = folder / checkpoint_name(step)
        if not step or target.exists():
            return
        partial = target.with_name(f"{target.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        shutil.copy(self.folder / JOURNAL, partial / "state.pt")
        if (self.folder / BEST).exists():
            # No links: tar, which may copy an older checkpoint now, takes a new link for a changed file.
            shutil.copytree(self.folder / BEST, partial / BEST)
        (partial / LAST).write_text(json.dumps({"trials": step}))
        partial.rename(target)
        for old in sorted(folder.iterdir(), key=step_of)[:-_KEPT]:
            # Renamed first: an interrupted removal must not leave half a checkpoint.
            shutil.rmtree(old.rename(old.with_suffix(".partial")), ignore_errors=True)
        seconds = time.monotonic() - begin
        self._pauses_until = begin + seconds + _PAUSE * seconds
        taken = [each.user_attrs["seconds"] for each in self.ended()]
        left = sum(taken) / len(taken) * (self.plan.trials - step) / self.ranks
        self.events.emit(
            "checkpoint",
            step=step,
            name=target.name,
            seconds=round(seconds, 3),
            eta_seconds=round(left, 1),
        )

    def results(self) -> dict[str, Any]:
        """Return a study's part of results.json."""
        best = self.best()
        rows = [
            {
                "trial": each.number + 1,
                "state": each.state.name.lower(),
                "best": each.number == best.number,
                "options": each.params,
                **each.user_attrs,
                "evaluations": [[step, value] for step, value in each.intermediate_values.items()],
            }
            for each in self.ended()
        ]
        return {
            "trials": rows,
            "metric": self.metric(best.user_attrs["scores"]),
            "importance": self._importance(),
        }

    def _importance(self) -> dict[str, float]:
        """Return each option's share of the differences between the scores; empty if too few are known."""
        scores = {each.values[0] for each in self.study.get_trials(False) if each.values}
        if len(self.plan.tune) < 2 or len(scores) < 2:
            return {}
        importance = optuna.importance
        try:
            shares = importance.get_param_importances(
                self.study, evaluator=importance.PedAnovaImportanceEvaluator()
            )
        except Exception as error:  # it needs several trials that differ
            self.events.note(f"importance of the options unknown: {first_line(error)}")
            return {}
        return {name: round(share, 4) for name, share in shares.items()}

    def finish(self, output: Path) -> int:
        """Make the best trial's output that of the job, with the study's results; return the exit code."""
        if self.best() is None:
            failures = [each.user_attrs.get("failure", "") for each in self.ended()]
            why = next(filter(None, reversed(failures)), "all were pruned")
            hint = "the trials' logs are in the results: job/logs/trial-N.log"
            self.events.error(f"no trial succeeded: {why}", hint)
            return 1
        best = self.folder / BEST
        own = json.loads((best / RESULTS).read_text(encoding="utf-8"))
        without = shutil.ignore_patterns(RESULTS, OWN_METRICS)
        shutil.copytree(best, output, dirs_exist_ok=True, ignore=without)
        with suppress(FileNotFoundError):  # it had no step
            shutil.copytree(best / OWN_METRICS, self.state / METRICS, dirs_exist_ok=True)
        shutil.copy(self.folder / JOURNAL, output / "study.journal")
        # The times are those of the best trial, if it ran in this attempt.
        is_earlier = self.best().number in self._ended_before
        seconds = {"total": 0.0} if is_earlier else dict(own["seconds"])
        total = round(time.monotonic() - self._begin, 3)
        seconds |= {"other trials": round(max(0.0, total - seconds["total"]), 3), "total": total}
        results = {**own, **self.results(), "seconds": seconds}
        save_json(output / RESULTS, results)
        self.events.emit("result", **results)
        return 0


def _suggest(trial: Any, name: str, domain: Domain) -> Any:
    if domain.choices:
        return trial.suggest_categorical(name, domain.choices)
    ends = (domain.low, domain.high)
    suggest = trial.suggest_int if all(isinstance(e, int) for e in ends) else trial.suggest_float
    return suggest(name, *ends, log=domain.log)


def restore(state: Path) -> bool:
    """Bring the newest checkpoint's journal and best model back; return whether there was one."""
    name = newest((state / CHECKPOINTS).glob("*"))
    folder = state / STUDY
    shutil.rmtree(folder, ignore_errors=True)
    if not name:
        return False
    folder.mkdir(parents=True)
    source = state / CHECKPOINTS / name
    shutil.copy(source / "state.pt", folder / JOURNAL)
    if (source / BEST).exists():
        shutil.copytree(source / BEST, folder / BEST)
    return True
