"""Send a job's folders to all nodes: what changed goes to the head by rsync, and from there in a tree."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from infra.errors import HostError, HostsError, UsageError
from infra.words import counted, format_size
from jobs.places.plan import PACKAGES, JobFolder, JobPaths
from provision.host import Host
from provision.on_node import spread
from provision.run_on_nodes import send

_LIMIT_S = 4 * 3600
_KEEP_FOLDERS, _KEEP_PACKAGES = 10, 4
"""Numbers of earlier versions that stay on a node, so that only changes are sent."""
_PARTIAL = 23
"""rsync's exit code if files are missing, such as those of another job that has just ended its copy."""
_SENT = re.compile(r"files transferred: ([\d,.]+).*?Total bytes sent: ([\d,.]+)", re.DOTALL)
_HINT = "`spr-cluster verify` checks the nodes, their disks, and the way to them"


def has_rsync() -> bool:
    """Whether this machine can send folders."""
    return bool(shutil.which("rsync") and shutil.which("ssh"))


def send_folders(
    head: Host,
    folders: Sequence[JobFolder],
    install: Callable[[], str],
    paths: JobPaths,
    ssh_config: Path,
    note: Callable[[str], None],
) -> None:
    """Put folders on all nodes and into a job, with the packages that the head then installs.

    ``install`` returns their name, or "" for none; it may take minutes in which the user edits files.
    Raises :class:`HostError`, or :class:`HostsError` with each node's reason.
    """
    items = []
    for folder in folders:
        name = Path(folder.store).name
        last = "" if folder.shared else f".last-{name.rpartition('-')[0]}"
        # Two jobs may send the same content at the same time.
        arrives = folder.store if folder.shared else f"spr-folders/.{name}.{paths.job_id}"
        note(f"sending {folder}")
        note(_send(folder, arrives, last, head.name, ssh_config))
        target = f"{paths.relative_root}/{folder.target}" if folder.target else ""
        items.append(
            {
                "store": folder.store,
                "arrives": arrives,
                "last": last,
                "target": target,
                "copied": not folder.shared,
                "keep": 0 if folder.shared else _KEEP_FOLDERS,
            }
        )
    if packages := install():
        items.append(_linked(packages, paths))
    if not items:
        return
    base = send(spread)
    plan = {"folders": items, "nodes": None, "argv": base.argv, "source": base.stdin}
    program = send(spread, lines=[json.dumps(plan)])
    said = head.run(program.render("giving the folders to all nodes"), timeout_s=_LIMIT_S).stdout
    failed = dict(line.split(": ", 1) for line in said.splitlines() if ": " in line)
    if failed:
        raise HostsError("the folder could not be copied to all nodes", failed, hint=_HINT)


def _linked(packages: str, paths: JobPaths) -> dict[str, Any]:
    return {
        "store": f"spr-packages/{packages}",
        "arrives": f"spr-packages/.{packages}.{paths.job_id}",
        "last": "",
        "target": f"{paths.relative_root}/{PACKAGES}",
        "copied": False,
        "keep": _KEEP_PACKAGES,
    }


def _send(folder: JobFolder, arrives: str, last: str, node: str, ssh_config: Path) -> str:
    """Send what changed to the head; return what that was.

    Raises :class:`UsageError` if the store would not have the content that its name stands for.
    """
    said = ""
    try:
        said = _rsync(folder, arrives, last, node, ssh_config)
    except HostError:
        if not folder.has_changed():
            raise
    if folder.has_changed():
        raise UsageError(f"{folder.root} changed after it was read", hint="run the command again")
    match = _SENT.search(said)
    files, size = (int(re.sub(r"\D", "", text)) for text in match.groups()) if match else (0, 0)
    return f"sent {counted(files, 'changed file')}, {format_size(size)}"


def _rsync(folder: JobFolder, arrives: str, last: str, node: str, ssh_config: Path) -> str:
    parent, begun = shlex.quote(str(Path(arrives).parent)), f".{Path(folder.store).name}.*"
    # What another job sent of the same, also before it was interrupted, is not sent again.
    links = f"$(cd {parent} && ls -dt {begun} 2>/dev/null | head -3 | sed s,^,--link-dest=../,)"
    there = f"mkdir -p {parent} && rsync" + ("" if folder.shared else f" {links}")
    argv = ["rsync", "-rlptz", "--stats", f"--rsync-path={there}"]
    argv += ["-e", shlex.join(["ssh", "-F", str(ssh_config), "-o", "BatchMode=yes"])]
    with tempfile.NamedTemporaryFile() as names:
        if folder.names is None:
            argv += ["--delete"]
        else:
            # Without ./, a name that begins with # or ; would be a comment.
            names.write(b"".join(b"./" + os.fsencode(name) + b"\0" for name in folder.names))
            names.flush()
            # By content: two edits in one second leave time and size equal.
            argv += ["--checksum", "--from0", f"--files-from={names.name}"]
            argv += [f"--link-dest=../{last}", f"--link-dest=../{Path(folder.store).name}"]
        argv += [f"{folder.root}/", f"{node}:{arrives}/"]
        for _ in range(2):
            done = subprocess.run(
                argv, capture_output=True, text=True, errors="replace", check=False
            )
            if done.returncode != _PARTIAL:
                break
    if done.returncode:
        reason = spread.find_reason(done.stderr)
        raise HostError(node, f"rsync of {folder.root} failed: {reason}", hint=_HINT)
    return done.stdout
