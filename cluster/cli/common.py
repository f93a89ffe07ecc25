"""What several commands share: the options that choose a cluster, and the way to it."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from cluster.context import Context
from cluster.local_files import ClusterFiles, remembered_cloud
from infra.clients import connect
from infra.cloud import Cloud
from infra.errors import UsageError
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
        "(default: where the cluster was made, else aws)",
    )
    parser.add_argument("--region", help="AWS region (default: your AWS configuration's)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on stdout")


def open_chosen_cloud(args: argparse.Namespace, *, progress: Progress | None = None) -> Cloud:
    """The cloud that the options name, else the one where this machine made the cluster."""

    ClusterFiles.of(args.name)  # a wrong name is answered before anything is asked
    made_in, region = remembered_cloud(args.name) or ("aws", None)
    name = args.cloud or made_in
    region = args.region or (region if name == made_in else None)
    return open_cloud(name, region, progress or Silent())


def open_context(args: argparse.Namespace, cloud: Cloud, **more: Any) -> Context:
    """Everything that the lifecycle acts with, for a cloud."""

    return Context(cloud=cloud, clients=connect(cloud), files=ClusterFiles.of(args.name), **more)


def confirm(question: str, *, yes: bool) -> None:
    """Ask on a terminal; raises :class:`UsageError` for a no, or where nobody can be asked."""

    if yes:
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("not on a terminal, so nobody can be asked", hint="--yes says yes")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("not confirmed; nothing was changed")
