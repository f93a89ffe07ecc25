"""Run a program on every node over SSH in parallel and print the answers. Runs on the head.

It reads a plan, one line of input: the program's ``argv`` and ``stdin``, and ``limit_s``, seconds per node.
It prints one line of JSON per node of the hostfile, in that order. It writes nothing to disk, which could be
full.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

_WIDTH = 64


def over_ssh(node: str, argv: list[str], connect_s: int = 20) -> list[str]:
    """Return the SSH command that runs words on another node."""
    return ["ssh", "-o", f"ConnectTimeout={connect_s}", node, shlex.join(argv)]


def ask(node: str, plan: dict[str, Any]) -> dict[str, Any]:
    """Return the exit code (``None`` after ``limit_s``) and the last line of stdout or else of stderr."""
    began, code, text = time.time(), None, ""
    with suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            over_ssh(node, plan["argv"]),
            input=plan["stdin"].encode(),
            capture_output=True,
            timeout=plan["limit_s"],
            check=False,
        )
        code, said = done.returncode, done.stdout.strip() or done.stderr.strip()
        text = said.decode(errors="replace").rpartition("\n")[2]
    return {"node": node, "code": code, "text": text, "began": began, "ended": time.time()}


def main() -> None:
    plan = json.loads(sys.stdin.readline())
    nodes = Path("~/hosts").expanduser().read_text().split()
    with ThreadPoolExecutor(_WIDTH) as pool:
        for answer in pool.map(lambda node: ask(node, plan), nodes):
            print(json.dumps(answer), flush=True)
