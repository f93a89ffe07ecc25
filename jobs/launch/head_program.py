"""Programs of :mod:`jobs.worker.batch` that the head's own Python runs, whatever its jobs were sent with."""

from __future__ import annotations

import shlex
from importlib import resources

_END = "_END_OF_THE_PROGRAM_"


def render_program(title: str, name: str, *arguments: str) -> str:
    """Return the shell command that runs the file ``name``."""
    source = resources.files("jobs.worker.batch").joinpath(name).read_text(encoding="utf-8")
    return f"# {title}\npython3 - {shlex.join(arguments)} <<'{_END}'\n{source}\n{_END}"
