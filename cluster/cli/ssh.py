"""``spr-cluster ssh``."""

from __future__ import annotations

import argparse
import os
import re
import shutil

from cluster.cli.common import add_cluster_options, open_chosen_cloud, open_context
from cluster.cli.parser import SubParsers, add_command
from infra.errors import UsageError
from infra.key_pair import read_public

_EXAMPLES = """\
  spr-cluster ssh                     a shell on the head node
  spr-cluster ssh node2
  spr-cluster ssh node1 -- lscpu      one command
"""
_NODE = re.compile(r"(node)?\d+")


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "ssh",
        "Open a shell on a node, or run a command there, with the cluster's key and pinned host keys.",
        _EXAMPLES,
    )
    add_cluster_options(parser)
    parser.add_argument("node", nargs="?", default="node0", help="node0 (the head), node1, …")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a command, after --")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    client = shutil.which("ssh")
    if not client:
        raise UsageError("ssh is not installed on this machine", hint="install the OpenSSH client")
    # argparse drops the "--", so in `ssh -- hostname` the node is hostname.
    named = _NODE.fullmatch(args.node)
    node = args.node if named else "node0"
    command = args.command if named else [args.node, *args.command]
    cloud = open_chosen_cloud(args)
    ctx = open_context(args, cloud)
    found = ctx.find_cluster().node(node)
    if not read_public(ctx.files.key):
        raise ctx.missing_key()
    command = command[1:] if command[:1] == ["--"] else command
    argv = [client, "-F", str(ctx.files.ssh_config), found.name, *command]
    os.execv(client, argv)  # hands the terminal over to OpenSSH
