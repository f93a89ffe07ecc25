"""The live view in a terminal, and its recording: one line of ``spr-cluster top --json`` per snapshot."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from infra.errors import UsageError
from infra.files import read_lines
from jobs.top.screen import render
from jobs.top.snapshot import Snapshot, parse_snapshot

_MAX_BYTES = 1 << 32


def read_recording(path: Path) -> Iterator[Snapshot]:
    """Yield a file's snapshots. Raises :class:`UsageError` for an invalid line."""
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


Source = Callable[[], "tuple[Snapshot | None, str]"]
"""Returns the newest snapshot, if there is one, and its problem ("" if none)."""
_LOOK_S = 0.2
"""Interval between checks of keys, the terminal's size, and the source."""
_REDRAW_S = 1.0
"""Maximum interval between redraws, because the time without an answer is also shown."""
_QUIT = b"qQ"


def show_live(source: Source, console: Console) -> None:
    """Show a source's snapshots on the whole screen until `q`; Ctrl-C raises as usual."""
    drawn: tuple[object, ...] = ()
    at = float("-inf")
    with (
        read_keys() as keys,
        Live(console=console, screen=True, auto_refresh=False, redirect_stderr=False) as live,
    ):
        while True:
            snapshot, notice = source()
            state = (snapshot, notice, console.size)
            if (
                state[1:] != drawn[1:]
                or state[0] is not drawn[0]
                or time.monotonic() > at + _REDRAW_S
            ):
                drawn, at = state, time.monotonic()
                live.update(_draw(snapshot, notice, *console.size), refresh=True)
            if any(key in _QUIT for key in keys(_LOOK_S)):
                return


def _draw(snapshot: Snapshot | None, notice: str, width: int, height: int) -> Text:
    if snapshot is None:
        return Text(notice or "connecting to the nodes", "bold red" if notice else "dim")
    return render(snapshot, width, height, notice)


@contextmanager
def read_keys() -> Iterator[Callable[[float], bytes]]:
    """Yield a function that waits some seconds for keys and returns them."""
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    after = termios.tcgetattr(terminal)
    # Keys one by one, without echo. Ctrl-Z would leave the shell in this screen.
    after[3] &= ~(termios.ICANON | termios.ECHO)
    after[6][termios.VSUSP] = b"\0"

    def wait(seconds: float) -> bytes:
        ready = select.select([terminal], [], [], seconds)[0]
        # The terminal is gone: quit.
        return (os.read(terminal, 1024) or b"q") if ready else b""

    termios.tcsetattr(terminal, termios.TCSADRAIN, after)
    try:
        yield wait
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
