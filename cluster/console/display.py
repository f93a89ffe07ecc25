"""Progress display on stderr: a live tree on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from cluster.console.output import pause_for_questions, terminal_width
from infra.errors import DeadlineError
from infra.wait import Progress

_PIPE_WIDTH = 160


@dataclass
class _Phase:
    title: str
    depth: int
    start: float = field(default_factory=time.monotonic)
    end: float | None = None
    mark: str = "[green]✓[/]"
    note: str = ""

    @property
    def seconds(self) -> float:
        return (self.end or time.monotonic()) - self.start


def format_table(rows: Sequence[Sequence[str]], optional: Sequence[str] = ()) -> str:
    """Render rows, header first, as aligned columns.

    On a narrow terminal, the ``optional`` columns are dropped one by one; if that is not enough, each row
    becomes a paragraph of ``HEADER value`` pairs.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    terminal = terminal_width(sys.stdout)
    if terminal is not None and sum(widths) + 2 * (len(widths) - 1) > terminal:
        if optional:
            at = list(rows[0]).index(optional[0])
            return format_table([[*row[:at], *row[at + 1 :]] for row in rows], optional[1:])
        return "\n".join(_as_paragraph(rows[0], row, terminal) for row in rows[1:])
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _as_paragraph(header: Sequence[str], row: Sequence[str], width: int) -> str:
    lines = [row[0]]
    for title, cell in zip(header[1:], row[1:], strict=True):
        pair = f"{title} {cell}"
        if len(lines[-1]) + 2 + len(pair) <= width:
            lines[-1] += f"  {pair}"
        else:
            lines.append(f"  {pair}")
    return "\n".join(lines)


def format_seconds(seconds: float) -> str:
    """Return ``4.2 s``, ``3 min 05 s``, or ``1 h 02 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


class PlainProgress:
    """Prints a line when a phase begins, when its note changes, and when it ends."""

    def __init__(self) -> None:
        self._open: list[_Phase] = []
        self._lock = threading.Lock()

    @contextmanager
    def phase(self, title: str) -> Iterator[None]:
        phase = _Phase(title, len(self._open))
        self._open.append(phase)
        self._say(phase, title)
        try:
            yield
        except BaseException as error:
            how = "timed out" if isinstance(error, DeadlineError) else "failed"
            how = "interrupted" if isinstance(error, KeyboardInterrupt) else how
            self._say(phase, f"{how} after {format_seconds(phase.seconds)}: {title}")
            raise
        else:
            self._say(phase, f"done in {format_seconds(phase.seconds)}: {title}")
        finally:
            self._open.remove(phase)

    def note(self, text: str) -> None:
        with self._lock:
            if self._open and self._open[-1].note != text:
                self._open[-1].note = text
                self._say(self._open[-1], f"  {text}")

    def _say(self, phase: _Phase, text: str) -> None:
        print("  " * phase.depth + text, file=sys.stderr, flush=True)


class TreeProgress:
    """A live tree of phases with their elapsed time."""

    def __init__(self) -> None:
        self._phases: list[_Phase] = []
        self._depth = 0
        self._spinner = Spinner("dots")
        self.console = Console(stderr=True)
        self.extra: RenderableType | None = None
        """A line below the tree, such as a progress bar."""
        self._live = Live(
            get_renderable=self._render, console=self.console, refresh_per_second=8, transient=False
        )

    @contextmanager
    def phase(self, title: str) -> Iterator[None]:
        phase = _Phase(title, self._depth)
        self._phases.append(phase)
        if self._depth == 0:
            self._live.start()
            pause_for_questions(self.paused)
        self._depth += 1
        try:
            yield
        except BaseException as error:
            phase.mark = "[yellow]–[/]" if isinstance(error, KeyboardInterrupt) else "[red]✗[/]"
            raise
        finally:
            phase.end = time.monotonic()
            self._depth -= 1
            if self._depth == 0:
                pause_for_questions(nullcontext)
                self._live.refresh()
                self._live.stop()
                self._phases.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the terminal to another program."""
        self._live.stop()
        try:
            yield
        finally:
            self._live.start()

    def note(self, text: str) -> None:
        for phase in reversed(self._phases):
            if phase.end is None:
                phase.note = text
                return

    def _render(self) -> RenderableType:
        grid = Table.grid(padding=(0, 1), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(justify="right", no_wrap=True)
        for phase in list(self._phases):
            mark: RenderableType = self._spinner
            if phase.end is not None:
                mark = Text.from_markup(phase.mark)
            note = f"\n[dim]{escape(phase.note)}[/]" if phase.note else ""
            mark = Padding(mark, (0, 0, 0, 2 * phase.depth))
            grid.add_row(mark, escape(phase.title) + note, format_seconds(phase.seconds))
        return Group(grid, self.extra) if self.extra is not None else grid


def make_console() -> Console:
    """Return a rich console on stdout; tables are 160 columns wide when it is not a terminal."""
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)


def make_progress() -> PlainProgress | TreeProgress:
    """Return the tree on a terminal that can redraw it, plain lines elsewhere."""
    is_dumb = os.environ.get("TERM") == "dumb"
    return TreeProgress() if sys.stderr.isatty() and not is_dumb else PlainProgress()


def paused(progress: Progress) -> AbstractContextManager[None]:
    """Leave the terminal to another program."""
    return progress.paused() if isinstance(progress, TreeProgress) else nullcontext()
