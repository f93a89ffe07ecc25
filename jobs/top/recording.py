"""Recorded snapshots: a file with one line of ``spr-cluster top --json`` per snapshot."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from infra.errors import UsageError
from infra.files import read_lines
from jobs.top.snapshot import Snapshot, parse_snapshot

_MAX_BYTES = 1 << 32


def read_recording(path: Path) -> Iterator[Snapshot]:
    """Yield a file's snapshots. Raises :class:`UsageError` for a line that is none."""
    for number, line in enumerate(read_lines(path, _MAX_BYTES), start=1):
        if line.strip():
            yield parse_snapshot(line, f"{path}, line {number}")


@dataclass
class Recording:
    """Plays a recording, one snapshot per interval, and stays at the last one."""

    path: Path
    interval_s: float
    clock: Callable[[], float] = time.monotonic
    _due: float = float("-inf")
    _snapshot: Snapshot | None = None
    _rest: Iterator[Snapshot] = field(init=False)

    def __post_init__(self) -> None:
        self._rest = read_recording(self.path)

    def latest(self) -> tuple[Snapshot | None, str]:
        """Return the snapshot that is due. Raises :class:`UsageError` for a file without any."""
        now = self.clock()
        if now >= self._due:
            self._due = now + self.interval_s
            self._snapshot = next(self._rest, self._snapshot)
        return self._require(), ""

    def last(self) -> Snapshot:
        """Return the last snapshot. Raises :class:`UsageError` for a file without any."""
        for snapshot in self._rest:
            self._snapshot = snapshot
        return self._require()

    def _require(self) -> Snapshot:
        if self._snapshot is None:
            raise UsageError(
                f"{self.path}: has no snapshot",
                hint=f"`spr-cluster top --json >> {self.path}` adds one",
            )
        return self._snapshot
