"""What several commands share: the options that choose a cluster, and the way to it."""

from __future__ import annotations

import argparse
import difflib
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from cluster.context import Context
    from infra.cloud import Cloud
    from infra.progress import Progress

DEFAULT_NAME = "spr"

SubParsers = Any


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as everything else here does, without the whole usage."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """What a command does not know is its own mistake, and it knows what was meant."""
        known, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"{rest[0]!r} is not known here{self._nearest(rest[0])}")
        return known, rest

    def _nearest(self, wish: str) -> str:
        known = [name for action in self._actions for name in action.option_strings]
        names = [name.lstrip("-") for name in known if name.startswith("--")]
        given = wish.partition("=")[0].lstrip("-")
        near = [name for name in names if given and name.startswith(given)]
        near = near or difflib.get_close_matches(given, names, n=1)
        return f"; did you mean --{near[0]}?" if near and wish.startswith("-") else ""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"spr-cluster: {message}\n  → {self.prog} --help\n")


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


def add_command(
    subparsers: SubParsers, name: str, help_: str, description: str, examples: str
) -> argparse.ArgumentParser:
    """A command's parser, with examples at the end of its help."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=help_,
        description=description,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return parser


def open_chosen_cloud(args: argparse.Namespace, *, progress: Progress | None = None) -> Cloud:
    """The cloud that the options name, else the one where this machine made the cluster."""
    from cluster.files import ClusterFiles, remembered_cloud
    from infra.clouds import open_cloud
    from infra.progress import Silent

    ClusterFiles.of(args.name)  # a wrong name is answered before anything is asked
    made_in, region = remembered_cloud(args.name) or ("aws", None)
    name = args.cloud or made_in
    region = args.region or (region if name == made_in else None)
    return open_cloud(name, region, progress or Silent())


def open_context(args: argparse.Namespace, cloud: Cloud, **more: Any) -> Context:
    """Everything that the lifecycle acts with, for a cloud."""
    from cluster.context import Context
    from cluster.files import ClusterFiles
    from infra.clients import connect

    return Context(cloud=cloud, clients=connect(cloud), files=ClusterFiles.of(args.name), **more)


def confirm(question: str, *, yes: bool) -> None:
    """Ask on a terminal; raises :class:`UsageError` for a no, or where nobody can be asked."""
    from infra.errors import UsageError

    if yes:
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("not on a terminal, so nobody can be asked", hint="--yes says yes")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("not confirmed; nothing was changed")
