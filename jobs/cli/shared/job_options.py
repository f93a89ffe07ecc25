"""Options that several commands share: placement, queue, training, and variables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from cluster.console.options import (
    CLUSTER,
    EVERYWHERE,
    Option,
    Request,
    option,
    parse_number,
    positive_int,
    switch,
)
from infra.errors import UsageError
from infra.s3_url import check_prefixes
from infra.spec import LONGEST_TTL
from infra.words import parse_duration
from jobs.cli.places.options import KUBERNETES
from jobs.cli.shared.when_done import EndRequest
from jobs.places.plan import new_job_id
from jobs.program.plan import check_variables, read_variables
from jobs.reference.plan import PRESETS
from jobs.train.request import (
    FILES,
    OTHER_FILES,
    change_options,
    expand_home,
    expand_model,
    expand_path,
)
from jobs.train.trackers import HUB_TOKEN, find_hub_token
from jobs.worker.spec import (
    PLACEMENTS,
    Ending,
    JobSpec,
    PlacementOptions,
    Recovery,
    Resources,
    Storage,
    Work,
)
from jobs.worker.tasks import TASKS
from jobs.worker.training.options import TrainOptions, defined_options, flag
from jobs.worker.training.text_task import BALANCED

_HIDDEN = {"output", "trial_seconds", "resume", "push_to"}
_FOR_EXPERTS = {
    *("accumulate", "attention_dropout", "backend", "compile", "freeze_layers", "ipex", "keep"),
    *("keep_checkpoints", "layer_decay", "lr_schedule", "max_grad_norm", "metric", "stride"),
    *("token_cache", "warmup_ratio", "wire"),
}
"""Training options whose defaults suit nearly every job; the usual help omits them."""


MOST_USD = 1_000_000
_COUNT: dict[str, Any] = {"parse": positive_int, "metavar": "N", "section": "placement"}


def limit_of_time(text: str) -> timedelta:
    """Parse the value of ``--max-time``. Raises :class:`UsageError`."""
    found = parse_duration(text, "")
    if not timedelta(0) < found <= LONGEST_TTL:
        raise UsageError(f"{text!r}: expected more than 0 and at most {LONGEST_TTL.days}d")
    return found


def limit_of_usd(text: str) -> float:
    """Parse the value of ``--budget``. Raises ``ValueError``."""
    expected = f"US dollars, above 0 and at most {MOST_USD:,}"
    return parse_number(text, lambda found: 0 < found <= MOST_USD, expected)


def bucket_url(text: str) -> str:
    """Parse ``s3://BUCKET/PREFIX``, or ``none``. Raises :class:`UsageError`."""
    return text if text == "none" else check_prefixes((text,), "")[0]


@dataclass(frozen=True, kw_only=True)
class PlacementRequest(Request):
    """Where ranks run."""

    nodes: int | None = option(
        "number of nodes (default: all; with --cores, 1)", **_COUNT, places=EVERYWHERE
    )
    cores: int | None = option(
        "physical cores of each node, to share it with other jobs (default: the whole node)",
        **_COUNT,
    )
    memory: int | None = option(
        "GiB of memory of each node (default: the same share as of its cores)",
        parse=positive_int,
        metavar="GIB",
        section="placement",
        needs="--cores",
    )
    ppn: int | None = option(
        "ranks per node (default: one per NUMA node)", **_COUNT, places=EVERYWHERE
    )
    placement: str = option(
        "tuned: as `train --tune placement` found, else as auto, each rank on its own cores; reference: "
        "the published recipe's numbers, which start more threads than there are cores (default: tuned)",
        "tuned",
        choices=PLACEMENTS,
        section="placement",
        for_experts=True,
    )
    ccl_workers: int | None = option(
        "cores per rank for oneCCL's workers instead of computing (default: 1)",
        **_COUNT,
        for_experts=True,
        places=(CLUSTER, KUBERNETES),
    )

    @property
    def placement_options(self) -> PlacementOptions:
        mode = "reference" if self.placement == "reference" else "auto"
        return PlacementOptions(mode, self.ppn, self.ccl_workers)

    @property
    def resources(self) -> Resources:
        nodes = self.nodes or (1 if self.cores else None)
        return Resources(nodes, self.placement_options, self.cores, self.memory)


@dataclass(frozen=True, kw_only=True)
class VariableRequest(Request):
    """Environment variables for the ranks."""

    env: tuple[str, ...] = option(
        "environment variable for the ranks; without a value, this machine's, or for HF_TOKEN, its "
        "Hugging Face login; @FILE, one with such lines. It goes to the nodes in a private file, never into "
        "a command line, log, or record; repeatable",
        (),
        repeats=True,
        metavar="NAME[=VALUE]",
    )

    def read_variables(self) -> tuple[str, ...]:
        """Return ``NAME=VALUE`` words; those of files come first, so others win."""
        files = [each[1:] for each in self.env if each.startswith("@")]
        read = [word for path in files for word in read_variables(expand_home(path))]
        given = [each for each in self.env if not each.startswith("@")]
        own = [f"{each}={find_hub_token()}" if each == HUB_TOKEN else each for each in given]
        return check_variables([*read, *own])


@dataclass(frozen=True, kw_only=True)
class ResultsRequest(Request):
    """Where a job's results go."""

    results: str | None = option("local folder (default: results/JOB)", metavar="DIR")

    def results_folder(self, kind: str, now: datetime) -> Path:
        """Return the folder of ``--results``, by default ``results/JOB``."""
        return expand_home(self.results) if self.results else Path("results", new_job_id(kind, now))


@dataclass(frozen=True, kw_only=True)
class QueueRequest(EndRequest):
    """A job in a cluster's queue."""

    retries: int | None = option(
        "run again up to N times after the loss of a rank or node; a training job resumes from its "
        "last checkpoint (default: 1 for training, 0 for programs)",
        parse=int,
        choices=tuple(range(11)),
        metavar="N",
        section="queue",
    )
    detach: bool = switch("return without following the job; see `attach`", section="queue")
    bucket: str | None = option(
        "store the job's inputs, checkpoints, and results below this prefix in S3, as JOB; `none` "
        "stores nothing (default: that of `up --bucket`)",
        parse=bucket_url,
        metavar="URL",
        section="queue",
    )
    max_time: timedelta | None = option(
        "longest time from the job's first start, with its restarts, such as 90m, 8h, or 2d; until then, "
        "the nodes stay for it. Then its ranks get SIGTERM and at least two minutes to save a checkpoint, "
        "and the job fails (default: no limit)",
        parse=limit_of_time,
        metavar="DURATION",
        section="queue",
    )
    budget: float | None = option(
        "the same limit as US dollars for its nodes, disks, and addresses, at their highest price",
        parse=limit_of_usd,
        metavar="USD",
        section="queue",
    )

    @property
    def is_new(self) -> bool:
        """Whether the job has not run before."""
        return True

    def spec(
        self, work: Work, resources: Resources, *, retries: int = 0, least_nodes: int = 0
    ) -> JobSpec:
        """Return the job as a value. ``retries`` is the default number of restarts."""
        bucket = "" if self.bucket == "none" else self.bucket
        return JobSpec(
            work,
            resources,
            Storage(bucket=bucket),
            Recovery(retries if self.retries is None else self.retries, least_nodes),
            Ending(
                down_when_done=self.detach and self.down_when_done,
                max_time_s=self.max_time.total_seconds() if self.max_time else 0.0,
                budget=self.budget or 0.0,
                on_finish=(self.on_finish or "") if self.detach else "",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class TaskRequest(Request):
    """A task and its options."""

    demo: bool = switch("train a small new model on the bundled sample", places=EVERYWHERE)
    given: Mapping[str, Any] = field(default_factory=dict)
    """The training options that the user gave, by name."""

    @property
    def task(self) -> str:
        return self.verb

    def read_options(self, preset: str | None = None) -> TrainOptions:
        """Return the training options of a new job. Raises :class:`UsageError` for one out of range."""
        if self.demo and preset:
            raise UsageError("--demo and --preset can't be used together")
        if self.demo and self.given.get("data"):
            raise UsageError("--demo and --data can't be used together")
        task = TASKS[self.task]
        base: TrainOptions = task.demo if self.demo else task.Options()
        base = PRESETS[preset].as_options(base) if preset else base
        if self.demo and "dataset" in self.given:
            nothing: dict[str, Any] = {"data": None}
            base = replace(base, **nothing)
        named = {key: self.given.get(key) for key in (*FILES, *OTHER_FILES)}
        paths = {key: path for key, path in named.items() if path and path != BALANCED}
        # Without its dot, ./NAME would be a name on the hub.
        paths = {key: path for key, path in paths.items() if not path.startswith("./")}
        given = {**self.given, **{key: expand_path(path) for key, path in paths.items()}}
        models = {key: given[key] for key in ("model", "teacher") if given.get(key)}
        return change_options(base, {**given, **{key: expand_model(models[key]) for key in models}})


def task_options(task: str) -> Iterator[Option]:
    """Yield a task's training options, from the fields of its dataclass."""
    for each in defined_options(TASKS[task].Options):
        if each.name in _HIDDEN:
            continue
        known, text = each.metadata, each.metadata["help"]
        how: dict[str, Any] = {"takes": 0, "const": True}
        if known["kind"] is not bool:
            several = known["several"]
            how = {"parse": known["kind"], "metavar": known["metavar"], "is_list": bool(several)}
            how["choices"] = () if several else known["choices"] or ()
            if each.default is not None and each.name != "model":
                text += f" (default: {each.default})"
        experts = each.name in _FOR_EXPERTS
        flags = (flag(each.name),)
        how |= {"needs": known["needs"], "for_experts": experts}
        yield Option(each.name, text, flags, section="training", **how)
