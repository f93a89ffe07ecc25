"""Trackers: rank 0's metrics as TensorBoard files, or in MLflow or Weights & Biases (``--report-to``).

A tracker only observes the job's events. Its library runs in its own thread, which computes nothing and
starts before training, because later OpenMP may bind the main thread, and so its new threads, to one core.
A tracker that fails or hangs costs notes and its own metrics, and never the training.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from .checkpoint_names import CHECKPOINTS, newest
from .errors import first_line
from .events import Events
from .output import state_folder

POINT_SECONDS = 1.0
"""Minimum time between two points. All trackers get the same ones, and always the first and the last step."""
FLUSH_SECONDS, FAILED_FLUSH_SECONDS = 30.0, 5.0
"""How long a job waits for its trackers at the end; after a failure or a stop, time is short."""
JOB_TAG = "spr-cluster.job"
"""The tag of an MLflow run that holds its job's ID."""
RETRY_SECONDS = 30.0
_KEPT_POINTS, _SENT_POINTS = 10_000, 100
"""Points that wait for a tracker, a few MB, before the oldest are dropped; and points that are sent together.
MLflow takes 1000 metrics per request."""
_FIGURES = {
    "loss": "train/loss",
    "lr": "train/learning_rate",
    "epoch": "train/epoch",
    "samples_per_second": "train/samples_per_second",
    "tokens_per_second": "train/tokens_per_second",
}
_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # By default, a server that is gone is noticed after minutes.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    # It would print the server's URL, which may hold a login.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "WANDB_ERROR_REPORTING": "false",
}
"""Variables for the libraries, unless the user sets them."""
# Wider than the project file's check of names: hiding too much does no harm.
_SECRET = re.compile(r"(TOKEN|(^|_)PAT|SECRET|PASSWORD|PASSWD|CREDENTIALS?|KEY)$")

Done = TypeVar("Done")


@dataclass(frozen=True)
class TrackedRun:
    """A job as trackers see it. After a restart or a resume, it continues its run."""

    output: Path
    options: Mapping[str, object]

    @property
    def job(self) -> str:
        """The job's ID: the name of its folder, in which the output is."""
        folder = self.output.resolve()
        name = folder.parent.name if folder.name == "output" else folder.name
        return re.sub(r"[^\w.-]", "-", name, flags=re.ASCII)


class Point(NamedTuple):
    """Figures by name after a step; ``at`` is in seconds since 1970."""

    step: int
    at: float
    figures: Mapping[str, float]


class Tracker(Protocol):
    """One run in one tracker. Its constructor and methods may raise any exception."""

    def log(self, points: Sequence[Point]) -> None:
        """Add points, at least one."""

    def finish(self, *, succeeded: bool) -> None:
        """End the run after its last point."""


class TensorBoard:
    """Files in ``output/tensorboard``. A resumed run hides earlier points of the steps that it repeats."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = run
        self._writer: Any = None
        self._open = import_module("torch.utils.tensorboard").SummaryWriter

    def log(self, points: Sequence[Point]) -> None:
        if self._writer is None:
            folder, first = str(self._run.output / "tensorboard"), points[0]
            # Scores come after their step, whose figures stay.
            is_next = first.figures.keys().isdisjoint(_FIGURES.values())
            self._writer = self._open(folder, purge_step=first.step + is_next)
            rows = (f"|{name}|{value}|" for name, value in self._run.options.items())
            text = "\n".join(("|option|value|", "|-|-|", *rows))
            self._writer.add_text("options", text, points[0].step)
        for point in points:
            for name, value in point.figures.items():
                self._writer.add_scalar(name, value, point.step, point.at)
        self._writer.flush()

    def finish(self, *, succeeded: bool) -> None:
        if self._writer is not None:
            self._writer.close()


class MLflow:
    """A run on the server that MLFLOW_TRACKING_URI names, found again by :data:`JOB_TAG`."""

    def __init__(self, run: TrackedRun) -> None:
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            raise LookupError("MLFLOW_TRACKING_URI is not set")
        self._entities = import_module("mlflow.entities")
        self._client = import_module("mlflow").MlflowClient()
        experiment, same_job = self._experiment(), f"tags.`{JOB_TAG}` = '{run.job}'"
        found = self._client.search_runs([experiment], same_job, max_results=1)
        # Another job had this name if its run is finished, and this one does not resume.
        resumes = newest(state_folder(run.output).glob(f"{CHECKPOINTS}/*"))
        if found and (resumes or found[0].info.status != "FINISHED"):
            own = found[0]
            self._client.update_run(own.info.run_id, "RUNNING")
        else:
            own = self._client.create_run(experiment, tags={JOB_TAG: run.job}, run_name=run.job)
        self._id = own.info.run_id
        # The server refuses another value, such as of a resumed run with more epochs.
        new = {name: value for name, value in run.options.items() if name not in own.data.params}
        params = [self._entities.Param(name, str(value)) for name, value in new.items()]
        self._client.log_batch(self._id, params=params)

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME")
        if not name:
            return os.environ.get("MLFLOW_EXPERIMENT_ID", "0")
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))

    def log(self, points: Sequence[Point]) -> None:
        metrics = [
            self._entities.Metric(name, value, int(point.at * 1000), point.step)
            for point in points
            for name, value in point.figures.items()
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self, *, succeeded: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if succeeded else "FAILED")


class Wandb:
    """A run of Weights & Biases with the job's ID; its own files are in ``output/wandb``."""

    def __init__(self, run: TrackedRun) -> None:
        self._wandb = wandb = import_module("wandb")
        settings = wandb.Settings(
            console="off", silent=True, disable_git=True, x_disable_stats=True
        )
        self._run = wandb.init(
            id=run.job,
            name=run.job,
            resume="allow",
            dir=str(run.output),
            config=dict(run.options),
            settings=settings,
        )

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log(dict(point.figures), step=point.step)

    def finish(self, *, succeeded: bool) -> None:
        self._run.finish(exit_code=int(not succeeded))
        # Its process writes what is left of the file only now.
        self._wandb.teardown(int(not succeeded))


TRACKERS: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": Wandb,
}


class Sender(threading.Thread):
    """One tracker and its thread."""

    def __init__(self, name: str, run: TrackedRun, note: Callable[[str], None]) -> None:
        super().__init__(name=name, daemon=True)
        self._run, self._note = run, note
        self._points: deque[Point] = deque(maxlen=_KEPT_POINTS)
        self._changed = threading.Condition()
        self._succeeded: bool | None = None
        self._off = False

    def put(self, point: Point) -> None:
        """Add a point without waiting."""
        with self._changed:
            self._points.append(point)
            self._changed.notify()

    def end(self, *, succeeded: bool) -> None:
        """Ask the tracker to end after its last point."""
        with self._changed:
            self._succeeded = succeeded
            self._changed.notify()

    def run(self) -> None:
        try:
            tracker = self._retry(lambda: TRACKERS[self.name](self._run))
            while points := self._next():
                self._retry(partial(tracker.log, points))
            tracker.finish(succeeded=bool(self._succeeded))
        except Exception as error:
            self.turn_off(without_secrets(first_line(error)))

    def _next(self) -> list[Point]:
        """Wait for points; return none at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._points or self._succeeded is not None)
            return [self._points.popleft() for _ in range(min(len(self._points), _SENT_POINTS))]

    def _retry(self, act: Callable[[], Done]) -> Done:
        """Return what a call returns, also after an outage. It is called once after the job's end."""
        has_failed = False
        while True:
            is_last = self._succeeded is not None
            try:
                done = act()
            except (ImportError, LookupError):  # a missing package or variable
                raise
            except Exception as error:
                if is_last or self._off:
                    raise
                if not has_failed:
                    why = without_secrets(first_line(error))
                    again = f"trying again every {RETRY_SECONDS:.0f} s"
                    self._note(f"warning: {self.name} gets no metrics: {why}; {again}")
                has_failed = True
                with self._changed:
                    self._changed.wait_for(lambda: self._succeeded is not None, RETRY_SECONDS)
            else:
                if has_failed and not self._off:
                    self._note(f"{self.name} gets metrics again")
                return done

    def turn_off(self, reason: str) -> None:
        """Report, only once, why the tracker gets nothing more."""
        with self._changed:
            if self._off:
                return
            self._off = True
        self._note(f"warning: {self.name} gets no more metrics: {reason}")


class Observer:
    """Turns the job's events into points."""

    def __init__(self, senders: Sequence[Sender], clock: Callable[[], float]) -> None:
        self._senders, self._clock = senders, clock
        self._step, self._last = 0, float("-inf")
        self._has_scores = False

    def see(self, event: str, fields: Mapping[str, Any]) -> None:
        """Pass on a step, unless one was very recent, and scores.

        Those of the result are of the best model, not of the last step, and only new without evaluations.
        """
        if event in ("step", "resumed", "evaluation"):
            self._step = fields["step"]
        if event == "step":
            now = self._clock()
            if now - self._last < POINT_SECONDS and self._step < fields["total"]:
                return
            self._last = now
            self._put({name: fields[key] for key, name in _FIGURES.items() if key in fields})
        elif event == "evaluation" or (event == "result" and not self._has_scores):
            scores = fields.get("scores", {})
            self._has_scores = bool(scores)
            if scores:
                self._put({f"eval/{name}": value for name, value in scores.items()})

    def _put(self, figures: Mapping[str, float]) -> None:
        point = Point(self._step, time.time(), figures)
        for sender in self._senders:
            sender.put(point)


@contextmanager
def report_to(
    names: str, run: TrackedRun, events: Events, clock: Callable[[], float] = time.monotonic
) -> Iterator[None]:
    """Report what happens inside a ``with`` block to the trackers in ``names``, the option's value."""
    senders = [Sender(name, run, events.note) for name in choose(names)]
    for name, value in _SETTINGS.items() if senders else ():
        os.environ.setdefault(name, value)
    for sender in senders:
        sender.start()
    events.observe = Observer(senders, clock).see
    try:
        yield
    except BaseException:
        _end(senders, FAILED_FLUSH_SECONDS, succeeded=False)
        raise
    _end(senders, FLUSH_SECONDS, succeeded=True)


def choose(names: str) -> list[str]:
    """Return the trackers that ``auto``, ``none``, or names such as ``mlflow,wandb`` stand for."""
    if names == "auto":
        names = "tensorboard" if find_spec("tensorboard") else "none"
    return [] if names == "none" else list(dict.fromkeys(names.split(",")))


def _end(senders: Sequence[Sender], seconds: float, *, succeeded: bool) -> None:
    for sender in senders:
        sender.end(succeeded=succeeded)
    deadline = time.monotonic() + seconds
    for sender in senders:
        sender.join(max(0.0, deadline - time.monotonic()))
        if sender.is_alive():
            sender.turn_off(f"it did not answer within {seconds:.0f} s")


def without_secrets(text: str) -> str:
    """Return a library's message without logins in URLs and values of secret variables."""
    text = re.sub(r"//\S*@", "//", text)
    for name, value in os.environ.items():
        if value and _SECRET.search(name):
            text = text.replace(value, "…")
    return text[:600]
