"""The live view in a terminal."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from jobs.top.screen import render
from jobs.top.snapshot import Snapshot

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
            if state != drawn or time.monotonic() > at + _REDRAW_S:
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
