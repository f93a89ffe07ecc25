"""Questions to Slurm from outside of its jobs: what it prints, and why a job waits."""

from __future__ import annotations

import subprocess

from .commands import ask

# Slurm's reasons that do not say which node is missing, nor why.
_MISSING = ("ReqNodeNotAvail", "Nodes required for job are DOWN")
_GONE = "--states=drain,down,no_respond"


def ask_slurm(argv: list[str]) -> str | None:
    """Return what a command of Slurm prints; ``None`` if Slurm does not answer."""
    text = ask(argv, stderr=subprocess.DEVNULL)
    return None if text is None else text.strip()


def find_missing(reason: str) -> str:
    """Return which nodes get no jobs and why, if that is the reason; "None" if it is over."""
    if not reason.startswith(_MISSING):
        return reason
    nodes = ask_slurm(["sinfo", "--noheader", "--Node", _GONE, "--format=%t %N %E"])
    if nodes is None:
        return reason
    drained = [line.split(" ", 1)[1] for line in nodes.splitlines() if line.startswith("dr")]
    return "; ".join(drained) or (reason if nodes else "None")
