"""The end of the cluster's time to live, before which a job saves a checkpoint and ends."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..spec import Ending

SHOW = ("sudo", "-n", "sh", "/run/spr-cluster/expiry", "show")
"""Prints the lifetime that the node's guard knows: end, latest end, and grace period."""
_SHARE, _LEAST_S, _MOST_S = 1 / 8, 20.0, 300.0
CHECKPOINTS = 3
"""How many times as long as its last checkpoint took a job has to save one more, and to copy it."""
SAVE_S = 120.0
"""The least time to save a checkpoint after the job's own limit, and after a `cancel`."""


def time_to_save(checkpoint_s: float, least_s: float) -> float:
    """Return how long a job may take to save a checkpoint if its last one took so long. Pure."""
    return max(least_s, CHECKPOINTS * checkpoint_s)


def paid_s(node_s: float, own_s: float, used: float, nodes: int) -> float:
    """Return how long so many seconds of one node pay for a job. Pure.

    It pays for the nodes that it uses and, after ``own_s``, for all, which only it keeps.
    """
    own = min(own_s, node_s / used)
    return own + (node_s - own * used) / nodes


def count_node_s(
    starts: Sequence[tuple[float, int]],
    ended: float,
    share: float = 1.0,
    over: float = math.inf,
    nodes: int = 0,
) -> float:
    """Return for how many seconds of one node a job pays. Pure.

    ``starts`` are when its attempts began and on how many nodes; each lasts until the next. The job pays for
    its ``share`` of the nodes that it uses and, after ``over``, for all, which only it keeps.
    """
    node_s = 0.0
    ends = [*(began for began, _ in starts[1:]), ended]
    for (began, used), until in zip(starts, ends):  # noqa: B905 - Python 3.8
        took = max(0.0, until - began)
        late = min(max(0.0, until - over), took)
        node_s += (took - late) * used * share + late * max(used, nodes)
    return node_s


@dataclass
class Deadline:
    """When a job has to end. `extend` may move the end of the cluster's time to live."""

    ending: Ending = field(default_factory=Ending)
    nodes: int = 1
    """How many stay only for it after the time to live."""
    starts: Sequence[tuple[float, int]] = field(default_factory=lambda: ((time.time(), 1),))
    """When its attempts began, and on how many nodes."""
    expires: float | None = None
    over: float = math.inf
    """When the cluster's time to live ends."""
    resumes: bool = False
    """Whether the limits are what earlier runs of the job left of them."""

    def take(self, text: str) -> None:
        """Process ``D LATEST GRACE_S``; a guard that fails once has not changed its mind."""
        words = text.split()
        if len(words) == 3 and all(word.isdecimal() for word in words):
            self.over, latest, grace = map(float, words)
            self.expires = max(self.over, latest - grace) if self.ending.max_time_s else self.over

    def longest_s(self, measured_s: float = 0.0) -> float:
        """Return how long it may take; its last checkpoint took ``measured_s``.

        One that waited in the queue has less time before it keeps all nodes, so its budget pays for less.
        """
        return max(0.0, min(self.ending.max_time_s, self._work_s(measured_s)))

    def _work_s(self, measured_s: float) -> float:
        """Return how long its budget pays for it, with enough left to save a checkpoint."""
        return self._paid_s - time_to_save(measured_s, SAVE_S)

    @property
    def _paid_s(self) -> float:
        if not self.ending.paid_node_s:
            return math.inf
        share, (began, used) = self.ending.node_share, self.starts[-1]
        earlier = count_node_s(self.starts[:-1], began, share, self.over, self.nodes)
        left, own = max(0.0, self.ending.paid_node_s - earlier), max(0.0, self.over - began)
        return began - self.starts[0][0] + paid_s(left, own, used * share, self.nodes)

    def find_end(self, checkpoint_s: float = 0.0, measured_s: float = 0.0) -> dict[str, Any]:
        """Return the deadline as the reason to stop now; {} if there is time left.

        Its last checkpoint took ``measured_s``; the next one may take ``checkpoint_s``. ``until`` is when
        the ranks are killed.
        """
        return self._find_limit(checkpoint_s, measured_s) or self._find_expiry(checkpoint_s)

    def _find_limit(self, checkpoint_s: float, measured_s: float) -> dict[str, Any]:
        first, longest = self.starts[0][0], self.longest_s(measured_s)
        limit = first + longest
        if not self.ending.max_time_s or time.time() <= limit:
            return {}
        of = "what was left of " if self.resumes else ""
        message = f"it took longer than {of}--max-time, {longest / 60:g} min"
        if self.ending.by_budget or self._work_s(measured_s) < self.ending.max_time_s:
            paid = f"pays for no more than {longest / 60:.1f} min and a checkpoint"
            message = f"{of}--budget ${self.ending.budget:g} {paid}"
        until = limit + time_to_save(checkpoint_s, SAVE_S)
        return {"message": message, "until": min(until, first + self._paid_s)}

    def _find_expiry(self, checkpoint_s: float) -> dict[str, Any]:
        at = self.expires
        if at is None:
            return {}
        share = min(max((at - self.starts[-1][0]) * _SHARE, _LEAST_S), _MOST_S)
        if time.time() < at - time_to_save(checkpoint_s, share):
            return {}
        over = time.strftime("%H:%M UTC", time.gmtime(at))
        message = f"the cluster's time to live is over at {over}"
        return {"message": message, "deadline": True, "until": at}
