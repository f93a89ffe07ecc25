"""A job's processes on nodes: proof that they run comes before proof that none is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Patterns for `pgrep -f`; a bracket keeps the search from finding its own shell.
RANK = "[w]orker[.]tasks"
SUPERVISOR = "[w]orker[.]supervisor"
_ANY_RANK = f"{RANK}|[w]orker[.]program"
_OURS = f"[m]piexec|[h]ydra|{_ANY_RANK}|{SUPERVISOR}|[r]un[.]sh"
# Both searches wait: a job begins and ends its processes on each node in turn.
_PRESENT = f"for i in $(seq 300); do pgrep -f '{_ANY_RANK}' && exit; sleep 0.2; done; exit 1"
_LEFT = (
    f"for i in $(seq 25); do left=$(pgrep -af '{_OURS}') || break; sleep 0.2; done; echo \"$left\""
)


@dataclass(frozen=True)
class JobProcesses:
    """Where a training job runs. ``ssh`` runs a command on a node, and fails if the command does."""

    ssh: Callable[[str, str], str]
    nodes: Sequence[str]

    @classmethod
    def find(cls, ssh: Callable[[str, str], str], nodes: Sequence[str]) -> JobProcesses:
        """Wait until a rank runs on each node: a search that finds nothing now would prove nothing later."""
        for node in nodes:
            assert ssh(node, _PRESENT).strip(), f"no rank runs on {node}"
        return cls(ssh, nodes)

    def require_gone(self) -> None:
        """Fail unless nothing of the job is left on any node within five seconds."""
        left = {node: found for node in self.nodes if (found := self.ssh(node, _LEFT).strip())}
        assert not left, left
