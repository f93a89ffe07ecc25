"""A job's data from S3: all of its nodes download them at the same time, before the ranks start."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ..runtime.events import MARK
from ..runtime.process import STOPPED
from .commands import Running
from .head import SSH, HeadFolder
from .launch import Launch
from .watch import announce
from .watcher import Watcher

_MODULE, VERSIONS = "worker.storage.stage", "data.json"
"""In the job's folder on the head: the version of each URL that the job's first attempt found."""
_CHECK_S = 300
# A node that is gone must not look like one that is slow.
_ALIVE = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")


def stage_data(watcher: Watcher, head: HeadFolder) -> int:
    """Return 0, or the exit code of an attempt whose data can't be had; the log has the reason.

    All attempts use the same version, because ranks with different data would not train together.
    """
    launch, job = watcher.launch, watcher.job
    if not launch.spec.storage.stage:
        return 0
    versions = head.read(VERSIONS) or _find_versions(launch, job.nodes[0])
    if not versions:
        watcher.log.poll()
        return 1
    head.write(VERSIONS, versions)
    script = {name: _render(launch, name, versions) for name in job.nodes}
    argv = {name: [*SSH, *_ALIVE, name, text] for name, text in script.items()}
    argv[job.nodes[0]] = ["bash", "-c", script[job.nodes[0]]]
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "start_new_session": True}
    running = {name: subprocess.Popen(words, **options) for name, words in argv.items()}
    return _wait(watcher, running)


def _find_versions(launch: Launch, here: str) -> dict[str, str]:
    """Return the present version of each URL; nothing, after saying why, if one can't be read."""
    found = {}
    for url, _ in launch.spec.storage.stage:
        words = [sys.executable, "-m", _MODULE, "--check", url]
        check = Running(words, _CHECK_S).wait()
        failed = {"message": f"the check of the data failed: {check.why or 'it said nothing'}"}
        # A library may print something before it.
        answer = "" if check.why else check.printed.rpartition("\n")[2]
        known = json.loads(answer) if answer else failed
        if "message" in known:
            text, hint = f"{here}: {known['message']}", known.get("hint")
            announce(event="error", message=text, hint=hint, rank=None, host=here)
            return {}
        found[url] = str(known["version"])
    return found


def _render(launch: Launch, name: str, versions: Mapping[str, str]) -> str:
    mark = os.environ.get(MARK, "")
    lines = [
        f"cd {shlex.quote(launch.folder)}",
        f"export PYTHONPATH=code {MARK}={shlex.quote(mark)}",
    ]
    for url, target in launch.spec.storage.stage:
        words = ["--node", name, "--expect", versions[url], url, target]
        lines.append(shlex.join([sys.executable, "-m", _MODULE, *words]))
    return " && ".join(lines)


def _wait(watcher: Watcher, running: Mapping[str, subprocess.Popen[bytes]]) -> int:
    codes: dict[str, int | None] = {}

    def is_over() -> bool:
        codes.update((name, process.poll()) for name, process in running.items())
        watcher.stop_if_leaving()
        return watcher.stopping or None not in codes.values() or any(codes.values())

    watcher.wait(is_over)
    for process in running.values():
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # on another node, it ends when it next prints
        process.wait()
    if watcher.stopping:
        return STOPPED
    watcher.log.poll()
    failed = [name for name, code in codes.items() if code]
    if failed and not watcher.log.errors:
        text = f"{failed[0]} was lost while it received the data"
        announce(event="error", message=text, rank=None, host=failed[0], lost_peer=True)
        watcher.log.poll()
    return 1 if failed else 0
