"""Ask Slurm on the head for the state of every node."""

from __future__ import annotations

from dataclasses import dataclass

from provision.host import Host

_DEADLINE_S = 60
# Slurm hears from the nodes within seconds of its start, as at the end of `up`.
_COMMAND = """# asking the queue
for attempt in 1 2 3 4 5 6 7 8 9 10; do
  answer=$(timeout 4 sinfo -h -N -o '%N|%T|%E' 2>&1) && case $answer in *'|unknown'*) ;; *) break ;; esac
  sleep 0.5
done
echo "$answer"
"""


@dataclass(frozen=True)
class QueueNode:
    """A node as Slurm sees it. ``reason`` says why Slurm does not use it."""

    name: str
    state: str
    reason: str


@dataclass(frozen=True)
class QueueReport:
    """Slurm's nodes, or the ``error`` if it does not answer."""

    nodes: tuple[QueueNode, ...] = ()
    error: str | None = None


def probe_queue(head: Host) -> QueueReport:
    """Ask the head's Slurm for its nodes."""
    text = head.run(_COMMAND, timeout_s=_DEADLINE_S, check=False).stdout.strip()
    nodes = [line.split("|", 2) for line in text.splitlines() if line.count("|") >= 2]
    if not nodes:
        last = text.splitlines()[-1] if text else "no answer within 4 s"
        return QueueReport(error=last.removeprefix("slurm_load_partitions: "))
    return QueueReport(tuple(QueueNode(*node) for node in nodes))
