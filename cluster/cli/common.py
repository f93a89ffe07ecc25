"""Parts that commands share: the options that choose a cluster, its context, and confirmation."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from cluster.context import Context
from cluster.events import describe_failure
from cluster.local_files import ClusterFiles, remembered_cloud
from infra.clients import connect, translate_boto_error
from infra.cloud import Cloud
from infra.errors import SprError, UsageError
from infra.open_cloud import open_cloud
from infra.progress import Progress, Silent

DEFAULT_NAME = "spr"


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    """``--name``, ``--cloud``, ``--region`` and ``--json``."""
    parser.add_argument("--name", default=DEFAULT_NAME, help="the cluster's name (default: spr)")
    add_cloud_options(parser)


def add_cloud_options(parser: argparse.ArgumentParser) -> None:
    """``--cloud``, ``--region`` and ``--json``."""
    parser.add_argument(
        "--cloud",
        choices=("aws", "local"),
        help="aws, or local: the embedded cloud on this machine "
        "(default: where the cluster was made, or aws)",
    )
    parser.add_argument("--region", help="AWS region (default: from your AWS configuration)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on stdout")


def open_chosen_cloud(args: argparse.Namespace, *, progress: Progress | None = None) -> Cloud:
    """Return the cloud that the options name, else the one in which this machine made the cluster."""
    ClusterFiles.of(args.name)  # refuses an invalid name before any request
    made_in, region = remembered_cloud(args.name) or ("aws", None)
    name = args.cloud or made_in
    region = args.region or (region if name == made_in else None)
    return open_cloud(name, region, progress or Silent())


def open_context(args: argparse.Namespace, cloud: Cloud, **more: Any) -> Context:
    """Return the context of the chosen cluster in a cloud."""
    files = ClusterFiles.of(args.name)
    return Context(cloud=cloud, clients=connect(cloud), files=files, command=args.verb, **more)


def record_failure(ctx: Context, failure: BaseException) -> BaseException:
    """Record the error that ends a command; return it with a hint that names the event log."""
    if not ctx.events.exists:
        return failure
    error = failure
    if isinstance(failure, Exception) and not isinstance(failure, SprError):
        error = translate_boto_error(failure) or failure
    if not isinstance(error, SprError):
        ctx.events.record("error", describe_failure(error))
        return error
    ctx.events.record("error", error.message, hint=error.hint)
    log = f"spr-cluster events --name {ctx.files.folder.name} shows what was done and why"
    error.hint = f"{error.hint}\n  → {log}" if error.hint else log
    return error


def confirm(question: str, *, yes: bool) -> None:
    """Ask on a terminal. Raises :class:`UsageError` if the answer is no or there is no terminal."""
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("this needs confirmation, but there is no terminal", hint="--yes confirms")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("not confirmed; nothing was changed")
