"""The job on a cluster's head that a command is about."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

from cluster.cli.common import open_chosen_cloud, open_context
from cluster.context import Context
from infra.progress import Progress, Silent
from jobs.launchers.queue.history import NAME, JobSummary, list_jobs
from provision.host import Host

T = TypeVar("T")


def add_job_argument(
    parser: argparse.ArgumentParser, help_: str = "(default: the only one that runs or waits)"
) -> None:
    """Add ``JOB``, which is optional."""
    parser.add_argument("job", nargs="?", metavar="JOB", type=_job_id, help=help_)


def _job_id(text: str) -> str:
    if text and not NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a job ID: expected one such as squad-20260731-142501-k3f; "
            "`spr-cluster jobs` lists them"
        )
    return text


def open_job(
    args: argparse.Namespace,
    choose: Callable[[tuple[JobSummary, ...], str | None], T],
    progress: Progress | None = None,
) -> tuple[Context, Host, T]:
    """Return the context of a cluster, its head, and which job there ``choose`` returns for ``JOB``."""
    ctx = open_context(args, open_chosen_cloud(args), progress=progress or Silent())
    head = ctx.host_opener()(ctx.find_cluster().head)
    return ctx, head, choose(list_jobs(head), args.job)
