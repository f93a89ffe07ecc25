"""``spr-cluster cp``: copy files between this machine and a node."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.cli.chosen_cluster import ClusterRequest, open_cluster
from cluster.cli.ssh import NOT_CONNECTED, run_client
from cluster.console.options import argument, switch
from cluster.console.output import say
from cluster.console.parser import Parser, add_request
from infra.errors import SprError, UsageError

# rsync's exit codes for lost connections and timeouts, and ssh's.
_BROKEN = (10, 12, 20, 30, 35, 255)

# rsync's exit code for a partial copy.
_PARTIAL = 23

_REMOTE = re.compile(r"(?:node)?(\d+):(.*)", re.DOTALL)


@dataclass(frozen=True)
class Place:
    """A path on a node, or on this machine if ``node`` is empty."""

    node: str
    path: str

    def __str__(self) -> str:
        if self.node:
            return f"{self.node}:{self.path or '.'}"
        # rsync and scp take a name with a colon for a host's.
        return f"./{self.path}" if ":" in self.path.partition("/")[0] else self.path


def parse_place(text: str) -> Place:
    """Parse ``PATH`` or ``NODE:PATH``. A node's path begins in the home folder."""
    if match := _REMOTE.fullmatch(text):
        return Place(f"node{int(match[1])}", re.sub("^~(/+|$)", "", match[2]))
    return Place("", os.path.expanduser(text))  # noqa: PTH111


@dataclass(frozen=True, kw_only=True)
class CopyRequest(ClusterRequest):
    """Copy files to a node or from it. An interrupted copy continues where it was.

    examples:
      spr-cluster cp data.csv node0:              into the home folder
      spr-cluster cp -r configs node1:work/
      spr-cluster cp node0:work/model.bin .
    """

    recursive: bool = switch("copy folders", flags=("-r", "--recursive"))
    source: str = argument("PATH, or NODE:PATH", metavar="SOURCE")
    target: str = argument("the same; one of both is on a node", metavar="TARGET")
    json: bool = False


def add_parser(parent: Parser) -> None:
    add_request(parent, "cp", run, CopyRequest)


def run(request: CopyRequest) -> int:
    source, target = parse_place(request.source), parse_place(request.target)
    if bool(source.node) == bool(target.node):
        raise UsageError(
            "exactly one of SOURCE and TARGET must be on a node",
            hint="such as: spr-cluster cp data.csv node0:",
        )
    if not source.node:
        if not Path(source.path).exists():
            raise UsageError(f"{source.path}: no such file or folder")
        if Path(source.path).is_dir() and not request.recursive:
            raise _folder_error(source.path)
    ctx = open_cluster(request)
    cluster = ctx.find_cluster()
    cluster.node(source.node or target.node)
    ctx.require_key()
    config = ctx.learn_nodes(cluster)

    def run_there(argv: list[str]) -> int:
        code = run_client(argv)
        return run_client(argv) if code == NOT_CONNECTED and ctx.access.repair_rule() else code

    code, is_folder = 0, not source.node and Path(source.path).is_dir()
    if source.node and shutil.which("ssh"):
        look = f"test -d {shlex.quote(source.path or '.')}"
        argv = ["ssh", "-n", "-F", str(config), source.node, look]
        code = run_there(argv)
        is_folder = code == 0
        if is_folder and not request.recursive:  # rsync would skip it, and succeed
            raise _folder_error(str(source))
    if code != NOT_CONNECTED:
        if is_folder and not target.node:
            with suppress(OSError):  # rsync reports it
                Path(target.path).mkdir(parents=True, exist_ok=True)
        argv = build_argv(source, target, config, is_folder=is_folder, recursive=request.recursive)
        code = run_there(argv)
    if code:
        hint = "the same command continues the copy" if code in _BROKEN else None
        # Dangling links, for example.
        hint = "rsync says above what was not copied" if code == _PARTIAL else hint
        raise SprError(f"{Path(argv[0]).name} failed with exit code {code}", hint=hint)
    return 0


def _folder_error(path: str) -> UsageError:
    return UsageError(f"{path} is a folder", hint="-r copies folders")


def build_argv(
    source: Place, target: Place, ssh_config: Path, *, is_folder: bool, recursive: bool
) -> list[str]:
    """Return the command that copies: rsync, else scp. Raises :class:`UsageError` without either."""
    if rsync := shutil.which("rsync"):
        # A pattern such as * is not a single folder.
        argv = [rsync, "-rLptz" if recursive else "-Lptz", "--partial"]
        if is_folder:
            # Other links may lead to a folder that contains them.
            argv = [rsync, "-rlptz", "--copy-unsafe-links", "--partial"]
            if target.node and target.path:
                argv += [f"--rsync-path=mkdir -p -- {shlex.quote(target.path)} && rsync"]
            # With a slash, rsync follows a source that is a link, and links to the folder's siblings.
            name = os.path.basename(source.path)  # noqa: PTH119 - pathlib drops a slash
            name = "" if name in (".", "..") else name
            source = replace(source, path=os.path.join(source.path or ".", ""))  # noqa: PTH118
            target = replace(target, path=os.path.join(target.path, name))  # noqa: PTH118
        known = subprocess.run(
            [rsync, "--help"], capture_output=True, text=True, check=False
        ).stdout
        if "--protect-args" in known or "--secluded-args" in known:
            argv += ["--protect-args"]
        else:  # as macOS's, whose words the node's shell reads
            source, target = (
                replace(each, path=shlex.quote(each.path or ".")) if each.node else each
                for each in (source, target)
            )
        argv += ["--progress"] if sys.stderr.isatty() else []
        ssh = shlex.join(["ssh", "-F", str(ssh_config)])
        return [*argv, "-e", ssh, "--", str(source), str(target)]
    if scp := shutil.which("scp"):
        say("rsync is not installed here: an interrupted copy will start over")
        argv = [scp, "-C", "-F", str(ssh_config), *(["-r"] if recursive else [])]
        return [*argv, str(source), str(target)]
    raise UsageError("neither rsync nor scp is installed on this machine")
