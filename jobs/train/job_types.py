"""Job types that are one file in ``jobs/worker``: the table, and their plan. See docs/add-a-job.md."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from infra.files import check_file, check_folder
from jobs.launchers.plan import JobPlan, PlacementOptions
from jobs.train.request import chosen_backend
from provision.stacks.stack import Stack

JOB_TYPES = {
    "digits": "a small classifier on synthetic digits: no data, no download, done in seconds",
}
"""Name of the file in ``jobs/worker``, and its line in ``spr-cluster train --help``."""


@dataclass(frozen=True)
class JobTypeRequest:
    """A job of one of :data:`JOB_TYPES`. ``options`` are its own, by name; a path's file is sent."""

    name: str
    options: Mapping[str, Any]
    results: Path
    placement: PlacementOptions = field(default_factory=PlacementOptions)
    nodes: int | None = None
    backend: str = "auto"
    retries: int = 0


def add_job_arguments(name: str, parser: argparse._ActionsContainer) -> None:
    """Add the options that a job type defines in its ``add_arguments``."""
    import_module(f"jobs.worker.{name}").add_arguments(parser)


def plan_job_type(request: JobTypeRequest, stack: Stack) -> JobPlan:
    """Return the plan of a job. Raises :class:`UsageError` for a file that does not exist."""
    argv: list[str] = []
    files: dict[str, Path | bytes] = {}
    for name, value in request.options.items():
        flag, sent = f"--{name.replace('_', '-')}", value
        if isinstance(value, Path):
            check_file(value)
            check_folder(value)
            sent = f"data/{name}/{value.name}"
            files[sent] = value.resolve()
        if sent is True:
            argv.append(flag)
        elif sent is not None and sent is not False:
            argv.append(f"{flag}={sent}")
    backend = chosen_backend(request.backend, stack)
    return JobPlan(
        kind=request.name,
        module=f"worker.{request.name}",
        argv=tuple(argv),
        backend=backend,
        title="Train",
        files=files,
        placement=request.placement,
        nodes=request.nodes,
        env={"SPR_BACKEND": backend},
        results=request.results,
        retries=request.retries,
    )
