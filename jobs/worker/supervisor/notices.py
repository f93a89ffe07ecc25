"""Nodes that Slurm gives no more jobs: EC2 takes them back, or their disk is full.

The nodes' health check, which takes them out of the queue, says so in Slurm's reason: ``spot: …`` or
``disk: …``. A node that somebody took out for another reason keeps its jobs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ASK_S = 5.0
WAIT_S = 12.0
"""After this time, the health check has seen what a rank has seen."""
_TEXTS = {
    "spot": "its node, {node}, goes: {text}",
    "disk": "its node, {node}, has a full disk: {text}",
}
_NO_ROOM_BYTES = 1 << 20


def parse_notices(text: str) -> dict[str, str]:
    """Return the reasons of the nodes in sinfo's lines, without other reasons. Pure."""
    rows = (line.split("|", 1) for line in text.splitlines() if "|" in line)
    return {node: reason for node, reason in rows if reason.partition(":")[0] in _TEXTS}


def describe_notice(
    notices: Mapping[str, str], nodes: Sequence[str], ranks_per_node: int
) -> dict[str, Any]:
    """Return the first of a job's nodes that goes as the error of its first rank; {} for none. Pure."""
    node = next((name for name in nodes if name in notices), None)
    if node is None:
        return {}
    kind, _, text = notices[node].partition(": ")
    rank, message = nodes.index(node) * ranks_per_node, _TEXTS[kind].format(node=node, text=text)
    return {"rank": rank, "host": node, "message": message, "lost_peer": True}


def has_no_room(folder: str = ".") -> bool:
    """Return whether the disk of a folder is full."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize < _NO_ROOM_BYTES


@dataclass
class NoticeWatch:
    """Asks Slurm every few seconds, in a thread: it may take long to answer."""

    ask: Callable[[], str]
    """Returns sinfo's lines."""
    found: dict[str, str] = field(default_factory=dict)
    """The reasons of the nodes that go, of the whole cluster."""
    _asked: threading.Condition = field(default_factory=threading.Condition)

    def start(self) -> None:
        threading.Thread(target=self._watch, daemon=True).start()

    def wait(self, nodes: Sequence[str], seconds: float) -> None:
        """Wait for a notice about one of these nodes."""
        with self._asked:
            self._asked.wait_for(lambda: any(name in self.found for name in nodes), seconds)

    def _watch(self) -> None:
        pause = threading.Event()
        while True:
            found = parse_notices(self.ask())
            with self._asked:
                self.found = found
                self._asked.notify_all()
            pause.wait(ASK_S)
