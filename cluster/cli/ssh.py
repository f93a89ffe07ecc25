"""``spr-cluster ssh``."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from collections.abc import Sequence

from cluster.cli.chosen_cluster import add_cluster_options, open_cluster
from cluster.console.output import say
from cluster.console.parser import Parser, SubParsers, add_command
from infra.errors import UsageError

_EXAMPLES = """\
  spr-cluster ssh                     a shell on the head node
  spr-cluster ssh node2
  spr-cluster ssh node1 -- lscpu      one command
"""
# OpenSSH's exit code for its own errors; a remote command may also return it.
_NOT_CONNECTED = 255
_NODE = re.compile(r"(node)?\d+")


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "ssh",
        "Open a shell on a node, or run a command there, with the cluster's key and pinned host keys.",
        _EXAMPLES,
        run=run,
    )
    add_cluster_options(parser, json=False)
    parser.add_argument("node", nargs="?", default="node0", help="node0 (the head), node1, …")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a command, after --")


def run(args: argparse.Namespace) -> int:
    client = shutil.which("ssh")
    if not client:
        raise UsageError("ssh is not installed on this machine", hint="install the OpenSSH client")
    # argparse drops the "--", so `ssh -- hostname` looks like a node named hostname.
    named = _NODE.fullmatch(args.node)
    node = args.node if named else "node0"
    if named and args.command and args.command[0] != "--" and args.command[0].startswith("-"):
        _parse_options_after_node(args)
    command = args.command if named else [args.node, *args.command]
    ctx = open_cluster(args)
    found = ctx.find_cluster().node(node)
    ctx.require_key()
    command = command[1:] if command[:1] == ["--"] else command
    argv = [client, "-F", str(ctx.files.ssh_config), found.name, *command]
    code = run_client(argv)
    if code == _NOT_CONNECTED and ctx.access.repair_rule():
        if command:
            # It may have begun: the connection may have dropped in the middle.
            say("SSH is open again; run the command again")
        else:
            code = run_client(argv)
    if code == _NOT_CONNECTED and (move := ctx.access.refused):
        say(f"{move}. To allow it: spr-cluster up {ctx.flags}")
    return code


def _parse_options_after_node(args: argparse.Namespace) -> None:
    """Parse our options in `ssh node1 --name bert -- lscpu`; argparse counts them as the command's."""
    parser = Parser(prog="spr-cluster ssh", add_help=False, allow_abbrev=False)
    add_cluster_options(parser, json=False)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    parser.parse_args(args.command, args)


def run_client(argv: Sequence[str]) -> int:
    """Run OpenSSH on the terminal; return its exit code, or 128 + N if signal N ended it."""
    code = subprocess.call(argv)
    return code if code >= 0 else 128 - code
