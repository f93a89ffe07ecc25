"""Simulated time shared by several processes: a sleep in one advances it for all."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from datetime import datetime, timezone
from pathlib import Path

_SIZE = 8


class SharedTime:
    """The tool's clock and EC2's, in eight bytes of a file; seconds since 1970."""

    def __init__(self, path: Path, start: float | None = None) -> None:
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._handle, _SIZE)
        self._map = mmap.mmap(self._handle, _SIZE)
        if start is not None:
            self._map[:] = struct.pack("d", start)

    def time(self) -> float:
        return float(struct.unpack("d", self._map[:])[0])

    def monotonic(self) -> float:
        return self.time()

    def sleep(self, seconds: float) -> None:
        fcntl.flock(self._handle, fcntl.LOCK_EX)
        try:
            self._map[:] = struct.pack("d", self.time() + seconds)
        finally:
            fcntl.flock(self._handle, fcntl.LOCK_UN)

    def now(self) -> datetime:
        """The same as a date, in UTC."""
        return datetime.fromtimestamp(self.time(), timezone.utc)
