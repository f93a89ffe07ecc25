"""Programs of :mod:`jobs.worker.batch` that a node's own Python runs, whatever its jobs were sent with."""

from __future__ import annotations

import shlex
from importlib import resources

_END = "_END_OF_THE_PROGRAM_"


def render_program(title: str, name: str, *arguments: str, node: str = "") -> str:
    """Return the shell command by which the head runs the file ``name``, or has another ``node`` run it."""
    source = resources.files("jobs.worker.batch").joinpath(name).read_text(encoding="utf-8")
    run = f"python3 - {shlex.join(arguments)}"
    there = f"ssh {node} {shlex.quote(run)}" if node else run
    return f"# {title}\n{there} <<'{_END}'\n{source}\n{_END}"
