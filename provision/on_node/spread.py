"""Give folders to a job on this node and to other nodes, each of which passes them on: a binomial tree.

It reads a plan, one line of input: the ``folders``, the ``nodes`` to give them to (``null``: those of the
hostfile after this one), and the ``argv`` and ``source`` with which this program runs on another node. A
folder's ``last`` is a link beside it to its last version, of which unchanged files are not sent again. It
prints a line for each node that does not get the folders.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

# A node that is silent for a minute is lost; a large folder may take hours on all its hops.
_SILENT_S = 60
_SSH = (
    *("ssh", "-o", "ConnectTimeout=10"),
    *("-o", f"ServerAliveInterval={_SILENT_S // 4}", "-o", "ServerAliveCountMax=4"),
)
_ARRIVES_S = 24 * 3600
"""Seconds after which an incomplete folder is removed."""
_WIDTH = 8


def main() -> None:
    plan = json.loads(sys.stdin.readline())
    os.chdir(Path.home())
    nodes = plan["nodes"]
    if nodes is None:
        for folder in plan["folders"]:
            # Where the head lacks it, no other node has it.
            folder["new"] = not Path(folder["store"]).exists()
        nodes = Path("hosts").read_text(encoding="utf-8").split()[1:]
    for folder in plan["folders"]:
        take(folder)
    with ThreadPoolExecutor(_WIDTH) as pool:
        given = [pool.submit(pass_on, plan, half) for half in halves(nodes)]
        for folder in plan["folders"]:
            use(folder)
        for each in given:
            print("".join(f"{line}\n" for line in each.result()), end="", flush=True)


def halves(nodes: list[str]) -> list[list[str]]:
    """Split nodes into groups of 1/2, 1/4, ... of them; the first of each gives to its others. Pure."""
    groups = []
    while nodes:
        size = (len(nodes) + 1) // 2
        groups.append(nodes[:size])
        nodes = nodes[size:]
    return groups


def take(folder: dict[str, Any]) -> None:
    """Give a folder that has arrived its final name."""
    arrived, store = Path(folder["arrives"]), Path(folder["store"])
    if arrived == store:
        return
    with suppress(OSError):  # another job has sent the same
        os.utime(arrived)  # rsync gave it the source's time
        arrived.rename(store)
    os.utime(store)
    shutil.rmtree(arrived, ignore_errors=True)
    if folder["last"]:
        # Another job's process may do the same.
        new = store.with_name(f"{folder['last']}.{os.getpid()}")
        new.symlink_to(store.name)
        new.replace(store.with_name(folder["last"]))


def use(folder: dict[str, Any]) -> None:
    """Copy a folder into the job, or link one that all jobs share; remove the oldest versions."""
    store, place = Path(folder["store"]), Path(folder["target"])
    place.parent.mkdir(parents=True, exist_ok=True)
    if folder["copied"]:
        subprocess.run(["cp", "-a", "--reflink=auto", f"{store}/.", f"{place}/"], check=True)
    else:
        place.unlink() if place.is_symlink() else None
        place.symlink_to(store.absolute())
    if folder["keep"]:
        with suppress(FileNotFoundError):  # another job renames or removes what is listed here
            remove_old(store.parent, folder["keep"])


def remove_old(parent: Path, keep: int) -> None:
    """Remove the oldest versions, and those that never arrived."""
    for begun in parent.glob(".*"):
        # rsync sets the time of modification, but not that of change.
        is_old = time.time() - begun.lstat().st_ctime > _ARRIVES_S
        if is_old and begun.is_dir() and not begun.is_symlink():
            shutil.rmtree(begun, ignore_errors=True)
    kept = sorted(parent.glob("[!.]*"), key=lambda path: path.stat().st_mtime)
    # A job that has not ended may need what it links to.
    links = [link for link in Path("spr-jobs").glob("*/*") if link.is_symlink()]
    used = {link.resolve() for link in links if not (link.parent / "end.json").exists()}
    for old in kept[:-keep]:
        if old.resolve() not in used:
            shutil.rmtree(old, ignore_errors=True)


def pass_on(plan: dict[str, Any], nodes: list[str]) -> list[str]:
    """Give the folders to the first of some nodes, which gives them to the others."""
    if not nodes:
        return []
    first, others = nodes[0], nodes[1:]
    text = plan["source"] + json.dumps({**plan, "nodes": others})
    program = f"printf '%s\\n' {shlex.quote(text)} | {shlex.join(plan['argv'])}"
    lacking = find_lacking(plan["folders"], first)
    tried = (give(each, first) for each in lacking[:-1])
    done = next((bad for bad in tried if bad.returncode), None)
    if done is None:
        # One connection takes the last folder and runs the program: a login takes longer than most changes.
        done = give(lacking[-1], first, program) if lacking else _run([*_SSH, first, program])
    if done.returncode:
        return [f"{first}: {find_reason(done.stderr)}", *pass_on(plan, others)]
    said = f"{done.stdout}{done.stderr}".splitlines()
    return [line for line in said if line.partition(": ")[0] in others]


def find_lacking(folders: list[dict[str, Any]], node: str) -> list[dict[str, Any]]:
    """Return the folders that a node does not have yet, and those whose content may change."""
    fixed = [
        each["store"] for each in folders if each["store"] != each["arrives"] and not each["new"]
    ]
    if not fixed:
        return folders
    has = _run([*_SSH, node, f"ls -d {shlex.join(fixed)} 2>/dev/null"]).stdout.split()
    return [folder for folder in folders if folder["store"] not in has]


def give(folder: dict[str, Any], node: str, then: str = ":") -> subprocess.CompletedProcess[str]:
    """Copy a folder to a node, and run the shell command ``then`` there, which prints to stderr."""
    store, arrives = Path(folder["store"]), folder["arrives"]
    links = [f"--link-dest=../{folder['last']}"] if folder["last"] else []
    parent = shlex.quote(str(store.parent))
    there = f'take() {{ mkdir -p {parent} && rsync "$@" && {{ {then}; }} >&2; }}; take'
    ways = ["-a", "--delete", f"--timeout={_SILENT_S}", *links, f"--rsync-path={there}"]
    return _run(["rsync", *ways, "-e", " ".join(_SSH), f"{store}/", f"{node}:{arrives}/"])


def _run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def find_reason(text: str) -> str:
    """Return the line of rsync's or ssh's messages that says why it failed."""
    usual = "--link-dest arg does not exist"
    lines = [line for line in text.splitlines() if line and usual not in line]
    reasons = [line for line in lines if "rsync error" not in line]
    return [*reasons, *reversed(lines), "failed"][0]
