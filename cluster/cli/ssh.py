"""``spr-cluster ssh``."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from cluster import user_ssh
from cluster.cli.chosen_cluster import add_cluster_options, open_cluster
from cluster.console.output import has_terminal, say
from cluster.console.parser import Parser, SubParsers, add_command
from infra.ec2 import key_pair
from infra.errors import UsageError
from infra.files import read_text
from provision.host import SSH_USER
from provision.run_on_nodes import on_all

_EXAMPLES = """\
  spr-cluster ssh                     a shell on the head node
  spr-cluster ssh node2
  spr-cluster ssh node1 -- lscpu      one command
  spr-cluster ssh -L 8888             a shell, and the node's port 8888 here
  spr-cluster ssh -L 8888 --no-shell  only the port, until Ctrl-C
  spr-cluster ssh --setup             names such as spr-node0 for ssh and scp
  spr-cluster ssh --authorize ann.pub let a colleague log in
"""
# The last line of the file may lack its end.
AUTHORIZE = """# authorizing a key
k={key} f=~/.ssh/authorized_keys; grep -qxF "$k" $f || printf '\\n%s\\n' "$k" >> $f"""
# OpenSSH's exit code for its own errors; a remote command may also return it.
NOT_CONNECTED = 255
_NODE = re.compile(r"(node)?\d+")
_FORWARD = re.compile(r"\d{1,5}|([\w.*-]*:)?\d{1,5}:[\w.-]+:\d{1,5}", re.ASCII)


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "ssh",
        "Open a shell on a node, or run a command there, with the cluster's key and pinned host keys.",
        _EXAMPLES,
        run=run,
    )
    _add_options(parser)
    setup = parser.add_argument_group("plain ssh, rsync, scp, and editors").add_argument
    setup(
        "--setup",
        action="store_true",
        help="add one line to ~/.ssh/config, with which they know all nodes as NAME-node0",
    )
    setup("--remove-setup", action="store_true", help="remove that line")
    setup("--authorize", metavar="FILE", help="add a colleague's public key on all nodes")
    parser.add_argument("node", nargs="?", default="node0", help="node0 (the head), node1, …")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a command, after --")


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_cluster_options(parser, json=False)
    parser.add_argument(
        "-L",
        "--forward",
        action="append",
        default=[],
        type=parse_forward,
        metavar="PORT",
        help="make a node's port available here: PORT, or as for OpenSSH, [ADDRESS:]PORT:HOST:PORT; "
        "repeatable",
    )
    parser.add_argument("--no-shell", action="store_true", help="only forward ports, until Ctrl-C")


def parse_forward(text: str) -> str:
    """Parse ``8888`` or OpenSSH's ``8888:localhost:8888``; a ``type`` for argparse."""
    match = _FORWARD.fullmatch(text)
    if not match or any(
        not 0 < int(port) < 65536 for port in re.findall(r"(?<![^:])\d+(?![^:])", text)
    ):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a port, or PORT:HOST:PORT")
    return text if ":" in text else f"{text}:localhost:{text}"


def _set_up(*, remove: bool) -> int:
    if remove:
        done = user_ssh.remove_include()
        say("~/.ssh/config is as before" if done else "there was nothing to remove")
    elif user_ssh.add_include():
        say("~/.ssh/config includes all nodes now. Try: ssh NAME-node0")
    else:
        say("~/.ssh/config includes all nodes already")
    return 0


def _authorize(args: argparse.Namespace) -> int:
    key = read_text(Path(args.authorize).expanduser()).strip()
    key_pair.check_public(key, f"--authorize {args.authorize}")
    ctx = open_cluster(args)
    nodes = ctx.find_cluster().nodes
    command = AUTHORIZE.format(key=shlex.quote(key))
    on_all("authorizing the key", map(ctx.host_opener(), nodes), lambda host: host.run(command))
    what = f"{key_pair.fingerprint(key)} {' '.join(key.split()[2:])}".rstrip()
    ctx.events.record("authorized", what, resources=[node.instance.id for node in nodes])
    say(f"{what} can log in: ssh {SSH_USER}@{nodes[0].address}, from an address of up --ssh-cidr")
    return 0


def run(args: argparse.Namespace) -> int:
    if args.authorize:
        return _authorize(args)
    if args.setup or args.remove_setup:
        return _set_up(remove=args.remove_setup)
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
    if args.no_shell and (command or not args.forward):
        raise UsageError("--no-shell needs -L, and no command")
    ports = [word for each in args.forward for word in ("-L", each)]
    ports += ["-o", "ExitOnForwardFailure=yes"] if ports else []
    if args.no_shell:
        ports.append("-N")
        say(f"forwarding {', '.join(args.forward)} on {found.name}; Ctrl-C ends it")
    # Without a terminal there, Ctrl-C would leave the command running.
    terminal = ["-t", "-o", "LogLevel=ERROR"] if command and has_terminal() else []
    argv = [client, "-F", str(ctx.files.ssh_config), *ports, *terminal, found.name, *command]
    code = run_client(argv)
    if code == NOT_CONNECTED and ctx.access.repair_rule():
        if command:
            # It may have begun: the connection may have dropped in the middle.
            say("SSH is open again; run the command again")
        else:
            code = run_client(argv)
    if code == NOT_CONNECTED and (move := ctx.access.refused):
        say(f"{move}. To allow it: spr-cluster up {ctx.flags}")
    return code


def _parse_options_after_node(args: argparse.Namespace) -> None:
    """Parse our options in `ssh node1 --name bert -- lscpu`; argparse counts them as the command's."""
    parser = Parser(prog="spr-cluster ssh", add_help=False, allow_abbrev=False)
    _add_options(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    parser.parse_args(args.command, args)


def run_client(argv: Sequence[str]) -> int:
    """Run OpenSSH on the terminal; return its exit code, or 128 + N if signal N ended it."""
    code = subprocess.call(argv)
    return code if code >= 0 else 128 - code
