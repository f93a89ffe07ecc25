"""``spr-cluster ssh``."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster import user_ssh
from cluster.cli.chosen_cluster import ClusterRequest, open_cluster
from cluster.console.options import REST, argument, option, options_of, switch
from cluster.console.output import has_terminal, say
from cluster.console.parser import Parser, add_request
from infra.ec2 import key_pair
from infra.errors import UsageError
from infra.files import read_text
from provision.host import SSH_USER
from provision.run_on_nodes import on_all

# The last line of the file may lack its end.
AUTHORIZE = """# authorizing a key
k={key} f=~/.ssh/authorized_keys; grep -qxF "$k" $f || printf '\\n%s\\n' "$k" >> $f"""
# OpenSSH's exit code for its own errors; a remote command may also return it.
NOT_CONNECTED = 255
_NODE = re.compile(r"(node)?\d+")
_FORWARD = re.compile(r"\d{1,5}|([\w.*-]*:)?\d{1,5}:[\w.-]+:\d{1,5}", re.ASCII)
_PLAIN_SSH: dict[str, Any] = {
    "section": "plain ssh, rsync, scp, and editors",
    "excludes": "way",
}


def parse_forward(text: str) -> str:
    """Parse ``8888`` or OpenSSH's ``8888:localhost:8888``. Raises ``ValueError``."""
    match = _FORWARD.fullmatch(text)
    if not match or any(
        not 0 < int(port) < 65536 for port in re.findall(r"(?<![^:])\d+(?![^:])", text)
    ):
        raise ValueError(f"{text!r}: expected a port, or PORT:HOST:PORT")
    return text if ":" in text else f"{text}:localhost:{text}"


@dataclass(frozen=True, kw_only=True)
class SshRequest(ClusterRequest):
    """Open a shell on a node, or run a command there, with the cluster's key and pinned host keys.

    examples:
      spr-cluster ssh                     a shell on the head node
      spr-cluster ssh node1 -- lscpu      one command
      spr-cluster ssh -L 8888             a shell, and the node's port 8888 here
      spr-cluster ssh -L 8888 --no-shell  only the port, until Ctrl-C
    """

    node: str = argument("node0 (the head), node1, …", "node0")
    command: tuple[str, ...] = argument("a command, after --", (), takes=REST)
    forward: tuple[str, ...] = option(
        "make a node's port available here: PORT, or as for OpenSSH, [ADDRESS:]PORT:HOST:PORT; "
        "repeatable",
        (),
        flags=("-L", "--forward"),
        repeats=True,
        parse=parse_forward,
        metavar="PORT",
    )
    no_shell: bool = switch("only forward ports, until Ctrl-C")
    setup: bool = switch(
        "add one line to ~/.ssh/config, so they know all nodes as NAME-node0", **_PLAIN_SSH
    )
    remove_setup: bool = switch("remove that line", **_PLAIN_SSH)
    authorize: str | None = option(
        "add a colleague's public key on all nodes", metavar="FILE", **_PLAIN_SSH
    )
    json: bool = False


def add_parser(parent: Parser) -> None:
    add_request(parent, "ssh", run, SshRequest)


def _set_up(*, remove: bool) -> int:
    if remove:
        done = user_ssh.remove_include()
        say("~/.ssh/config is as before" if done else "there was nothing to remove")
    else:
        word = "now" if user_ssh.add_include() else "already"
        names = user_ssh.reached()
        what = (
            f"the nodes of {', '.join(names)}. Try: ssh {names[0]}-node0"
            if names
            else ("the nodes of every cluster that this machine uses; it has not used one yet")
        )
        say(f"~/.ssh/config {word} includes {what}")
    return 0


def _authorize(request: SshRequest, file: str) -> int:
    key = read_text(Path(file).expanduser()).strip()
    key_pair.check_public(key, f"--authorize {file}")
    ctx = open_cluster(request)
    nodes = ctx.find_cluster().nodes
    command = AUTHORIZE.format(key=shlex.quote(key))
    on_all("authorizing the key", map(ctx.host_opener(), nodes), lambda host: host.run(command))
    what = f"{key_pair.fingerprint(key)} {' '.join(key.split()[2:])}".rstrip()
    ctx.events.record("authorized", what, resources=[node.instance.id for node in nodes])
    say(f"{what} can log in: ssh {SSH_USER}@{nodes[0].address}, from an address of up --ssh-cidr")
    return 0


def run(request: SshRequest) -> int:
    named = _NODE.fullmatch(request.node)
    first = "".join(request.command[:1])
    has_later = bool(named) and first.startswith("-") and first != "--"
    if has_later:
        request = _read_options_after_node(request)
    plain = request.authorize or request.setup or request.remove_setup
    others = request.command or request.forward or request.no_shell or request.has_set("node")
    if plain and (has_later or others):
        raise UsageError("--setup, --remove-setup, and --authorize take no node, command, or port")
    if request.authorize:
        return _authorize(request, request.authorize)
    if request.setup or request.remove_setup:
        return _set_up(remove=request.remove_setup)
    client = shutil.which("ssh")
    if not client:
        raise UsageError("ssh is not installed on this machine", hint="install the OpenSSH client")
    # The parser drops the "--", so `ssh -- hostname` looks like a node named hostname.
    node = request.node if named else "node0"
    command = request.command if named else (request.node, *request.command)
    ctx = open_cluster(request)
    cluster = ctx.find_cluster()
    found = cluster.node(node)
    ctx.require_key()
    config = ctx.learn_nodes(cluster)
    command = command[1:] if command[:1] == ("--",) else command
    if request.no_shell and (command or not request.forward):
        raise UsageError("--no-shell needs -L, and no command")
    ports = [word for each in request.forward for word in ("-L", each)]
    ports += ["-o", "ExitOnForwardFailure=yes"] if ports else []
    if request.no_shell:
        ports.append("-N")
        say(f"forwarding {', '.join(request.forward)} on {found.name}; Ctrl-C ends it")
    # Without a terminal there, Ctrl-C would leave the command running.
    terminal = ["-t", "-o", "LogLevel=ERROR"] if command and has_terminal() else []
    argv = [client, "-F", str(config), *ports, *terminal, found.name, *command]
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


def _read_options_after_node(request: SshRequest) -> SshRequest:
    """Read our options in `ssh node1 --name bert -- lscpu`, which the parser takes for the command's."""
    parser = Parser("spr-cluster ssh", add_help=False)
    parser.request = SshRequest
    parser.add(each for each in options_of(SshRequest) if each.name != "node")
    _, later = parser.parse(request.command)
    both = {name: value for name, value in vars(later).items() if value and name != "node"}
    forward = request.forward + later.forward
    return replace(request, **{**both, "forward": forward, "command": later.command})


def run_client(argv: Sequence[str]) -> int:
    """Run OpenSSH on the terminal; return its exit code, or 128 + N if signal N ended it."""
    code = subprocess.call(argv)
    return code if code >= 0 else 128 - code
