"""The Python API: clusters and jobs, for notebooks and pipelines. ``docs/python-api.md`` explains it.

:mod:`spr_cluster` has its public names.

Each method is a command of ``spr-cluster``. Keywords are the command's options: ``idle_timeout="1h"`` is
``--idle-timeout=1h``. It returns what ``--json`` prints, and raises the errors of :mod:`infra.errors`.
Nothing asks a question or prints to stdout; progress goes to stderr.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.console.options import Option, opposite
from infra.errors import JobError, SprError, UsageError
from infra.files import read_object
from infra.project_file import PROJECT_FILE, read_project_file
from infra.words import nearest
from jobs.cli import build_parser, invoke
from jobs.cli.shared.project_options import all_options
from jobs.places.plan import own_folder

__all__ = ["Cluster", "Job", "JobError", "Run", "SprError", "Training", "UsageError", "study"]
Value = str | int | float | Path
Given = Value | Sequence[Value] | Mapping[str, Value | Sequence[Value] | None] | None
"""``True`` sets a switch, ``False`` clears it. ``None`` omits an option; in an ``env``, it is this machine's
value."""


@dataclass(frozen=True, repr=False)
class _Work:
    """The words of a command that submits a job, its options, and a program with its arguments."""

    words: tuple[str, ...]
    options: Mapping[str, Given] = field(default_factory=dict)
    program: tuple[str, ...] = ()


class Training(_Work):
    """A training job: a task, or a training job of ``spr-cluster.toml``, with the options of ``train``."""

    def __init__(self, task: str, **options: Given) -> None:
        super().__init__(("train", task), options)


def study(task: str, *, tune: Given, **options: Given) -> Training:
    """Return a job that trains many trials and keeps the best model, with the options of ``study``.

    ``tune`` has the values to try: ``{"learning_rate": "1e-5..5e-5"}``.
    """
    if not tune:
        raise UsageError("a study needs tune", hint='tune={"learning_rate": "1e-5..5e-5"}')
    return Training(task, tune=tune, **options)


class Run(_Work):
    """A program with its arguments, for every rank, with the options of ``run``."""

    def __init__(self, *program: Value, **options: Given) -> None:
        for word in program:
            if not isinstance(word, Value):
                raise UsageError(
                    f"Run: {word!r} is no word of a command",
                    hint="Run('python', 'train.py', 3e-5)",
                )
        super().__init__(("run",), options, tuple(map(str, program)))


@dataclass(frozen=True)
class Cluster:
    """A cluster by its name and place. The machines are :class:`cluster.nodes.Cluster`.

    It needs no closing. It and its jobs continue when Python ends, until :meth:`down`.
    """

    name: str
    cloud: str
    region: str
    details: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The value of the command that found it: ``up`` or ``status``."""

    @staticmethod
    def plan(**options: Given) -> dict[str, Any]:
        """Return what :meth:`up` would do and cost (``up --dry-run``)."""
        return _call(["up"], {**options, "dry_run": True})

    @classmethod
    def up(cls, *, yes: bool = False, **options: Given) -> Cluster:
        """Create, resize, or complete a cluster (``up``).

        Raises :class:`UsageError` with the price if it costs money and ``yes`` is not given.
        """
        for name in ("dry_run", "check"):
            if options.get(name):
                raise UsageError(
                    f"{name}: not in Python", hint="Cluster.plan shows what `up` would do"
                )
        return cls._from(_call(["up"], {**options, "yes": yes}))

    @classmethod
    def find(cls, name: str | None = None, **options: Given) -> Cluster:
        """Return an existing cluster, by default the only one that this machine knows.

        Raises :class:`UsageError` if there is none.
        """
        found = cls._from(_call(["status"], {"name": name, **options}))
        if found.details["state"] == "none":
            raise UsageError(f"no cluster {found.name!r} in {found.cloud} {found.region}")
        return found

    @classmethod
    def _from(cls, value: dict[str, Any]) -> Cluster:
        return cls(value["cluster"], value["cloud"], value["region"], value)

    @property
    def _place(self) -> dict[str, Given]:
        return {"name": self.name, "cloud": self.cloud, "region": self.region}

    def _here(self, options: Mapping[str, Given]) -> dict[str, Given]:
        """Return options with this cluster's place; another one's is refused."""
        for name in self._place:
            if name in options:
                raise UsageError(f"{name}: the cluster is {self.name}; Cluster.find finds others")
        return {**options, **self._place}

    def status(self) -> dict[str, Any]:
        """Return its nodes, cost, time left, and queue (``status``)."""
        return _call(["status"], self._place)

    def extend(self, time: str, *, yes: bool = False) -> dict[str, Any]:
        """Extend its time to live, such as by ``2h`` (``extend``)."""
        return _call(["extend", time], dict(**self._place, yes=yes))

    def down(self, *, yes: bool = False, **options: Given) -> dict[str, Any]:
        """Remove it and verify that nothing is left (``down``).

        Raises :class:`UsageError` without ``yes`` if it costs money, belongs to another user, or has
        running jobs or results that were not fetched.
        """
        return _call(["down"], self._here({**options, "yes": yes}))

    def submit(self, job: Training | Run | str, **options: Given) -> Job:
        """Submit a job, or one of ``spr-cluster.toml`` by its name, without waiting for it.

        ``options`` take precedence over the job's own.
        """
        if isinstance(job, str) and job not in (jobs := read_project_file().table("jobs")):
            raise UsageError(
                f"{PROJECT_FILE} has no job {job!r}{nearest(job, jobs)}",
                hint="a program is a Run, such as Run('python', 'train.py')",
            )
        work = _Work(("run", job)) if isinstance(job, str) else job
        if not isinstance(work, _Work):
            raise UsageError(
                f"{job!r} is no job", hint="Training('squad'), Run('python', 'train.py')"
            )
        given = {**self._here({**work.options, **options}), "detach": True}
        if given.get("dry_run"):
            raise UsageError("dry_run: not in Python", hint="spr-cluster train or run --dry-run")
        return self.job(_call(work.words, given, work.program)["job"])

    def job(self, id_: str) -> Job:
        """Return a job by its ID, such as one that another program submitted."""
        return Job(self, id_)

    def jobs(self) -> dict[str, Any]:
        """Return all jobs, oldest first (``jobs``)."""
        return _call(["jobs"], self._place)


@dataclass
class Job:
    """A job on a cluster."""

    cluster: Cluster
    id: str
    _folder: Path | None = field(default=None, repr=False, compare=False)

    def _call(self, command: str, **options: Given) -> dict[str, Any]:
        return _call([command, self.id], self.cluster._here(options))

    @property
    def state(self) -> str:
        """Such as queued, running, succeeded, failed, or cancelled; asks the cluster."""
        return str(self.status()["state"])

    def status(self) -> dict[str, Any]:
        """Return its state, times, nodes, and the cause of a failure (``jobs JOB``)."""
        return self._call("jobs")

    def wait(self, timeout: int | None = None) -> dict[str, Any]:
        """Wait until it ends, by default for a week (``wait``); ``timeout`` is in seconds.

        Raises :class:`JobError` unless it succeeds, :class:`infra.errors.DeadlineError` after the timeout.
        """
        return self._call("wait", timeout=timeout)

    def fetch(self, folder: str | Path | None = None, **options: Given) -> dict[str, Any]:
        """Download its model, log, and results, by default to ``results/JOB`` (``fetch``)."""
        value = self._call("fetch", results=folder, **options)
        self._folder = Path(value["results"]).absolute()
        return value

    @property
    def results(self) -> dict[str, Any]:
        """The content of ``results.json``, which is fetched first if it is not here yet.

        Raises :class:`JobError` if the job has none: it has not ended, it failed, or it does not train.
        """
        name, folder = "results.json", self._folder
        if folder is None or not (folder / name).exists():
            folder = Path(self.fetch(folder)["results"])
        if not (folder / name).exists():
            raise JobError(
                f"job {self.id} has no {name}", hint=f"its log is {own_folder(folder) / 'log'}"
            )
        return read_object(folder / name)

    def log(self, **options: Given) -> str:
        """Return its log so far, or that of a ``rank`` (``logs``)."""
        return "\n".join(_collect(["logs", self.id], self.cluster._here(options)))

    def cancel(self, **options: Given) -> dict[str, Any]:
        """End it on all nodes; one that trains saves a checkpoint first (``cancel``)."""
        return self._call("cancel", **options)


def _call(
    words: Sequence[str], options: Mapping[str, Given], program: Sequence[str] = ()
) -> dict[str, Any]:
    """Run a command; return what it prints with ``--json``."""
    value: dict[str, Any] = json.loads(json.dumps(_collect(words, options, program)[-1]))
    return value


def _collect(
    words: Sequence[str], options: Mapping[str, Given], program: Sequence[str] = ()
) -> list[Any]:
    """Run a command; return the results that it shows."""
    words = [*map(str, words)]  # a number, which its parser refuses
    for word in words:
        if word.startswith("-"):
            raise UsageError(f"unexpected {word!r}: options are keywords, such as nodes=2")
    found: list[Any] = []
    rest = ["--", *program] if program else []
    command = words[0]
    # A job of spr-cluster.toml may be a training.
    if words[:1] == ["run"] and words[1:]:
        command = "train" if "task" in read_project_file().table("jobs", words[1]) else "run"
    invoke([*words, *_render(command, options), *rest], found.append)
    return found


def _render(command: str, options: Mapping[str, Given]) -> Iterator[str]:
    """Return options as words of a command line, whose parser checks them."""
    known = {flag: each for each in all_options(build_parser(command)) for flag in each.flags}
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        option = known.get(flag)
        if flag in ("--help", "--advanced"):
            raise UsageError(f"{name}: not in Python", hint=f"spr-cluster {command} {flag}")
        if option is None:
            yield flag  # refused there; its value may be a secret
        elif value is True:
            yield flag
        elif value is False and option.const is None:
            raise UsageError(f"{name}: False is not a value", hint="None omits an option")
        elif value is False:
            yield from [opposite(flag)] * option.is_switch
        elif value is not None:
            yield from (f"{flag}={word}" for word in _split(option, value))


def _split(option: Option, value: Any) -> list[str]:
    """Return an option's words: several if it can be repeated, else one with commas."""
    if isinstance(value, Mapping):
        words = [key if text is None else f"{key}={_join(text)}" for key, text in value.items()]
    elif isinstance(value, Sequence) and not isinstance(value, str):
        words = [str(each) for each in value]
    else:
        return [str(value)]
    return (words or [*option.if_empty]) if option.repeats else [",".join(words)]


def _join(value: Value | Sequence[Value]) -> str:
    return str(value) if isinstance(value, Value) else ",".join(map(str, value))
