"""The place where a job runs, and the job there that a command is about."""

from __future__ import annotations

import argparse

from cluster.cli.common import add_cluster_options, open_chosen_cloud, open_context
from infra.wait import Progress, Silent
from jobs.cli.k8s.access import add_access_options, find_access, open_kubernetes
from jobs.launchers.launcher import NAME, Launcher
from jobs.launchers.queue.launcher import QueueLauncher

_ONLY_ACTIVE = "(default: the only one that runs or waits)"


def add_job_options(
    parser: argparse.ArgumentParser, help_: str = _ONLY_ACTIVE, *, json: bool = True
) -> None:
    """Add ``JOB``, which is optional, and what chooses the cluster or namespace in which it is."""
    parser.add_argument("job", nargs="?", metavar="JOB", type=_job_id, help=help_)
    add_cluster_options(parser, json=json)
    add_access_options(parser)


def _job_id(text: str) -> str:
    if text and not NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a job ID: expected one such as squad-20260731-142501-k3f; "
            "`spr-cluster jobs` lists them"
        )
    return text


def open_launcher(args: argparse.Namespace, progress: Progress | None = None) -> Launcher:
    """Return the place of a job: Kubernetes if an option or its submission says so, else a cluster."""
    access = find_access(args)
    if access is not None:
        return open_kubernetes(access, args)
    ctx = open_context(args, open_chosen_cloud(args), progress=progress or Silent())
    cluster = ctx.find_cluster()
    return QueueLauncher(ctx, ctx.host_opener()(cluster.head), cluster.expires)
