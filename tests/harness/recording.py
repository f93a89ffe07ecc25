"""Records the main job on the embedded cloud as an animated drawing of a terminal, for README.md.

`python -m tests.harness.recording docs/recording.svg FOLDER`   (`make recording`)

Each command runs in a terminal. Time in which only numbers change is cut; the tool's own times are those of
the run.
"""

from __future__ import annotations

import copy
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import pyte

COLUMNS, LINES = 100, 27
LENGTH_S, END_S = 25.0, 3.0
"""Of the animation, at most, and of its last picture."""
_WAIT_S, _SETTLE_S = 1.2, 0.2
"""Of the animation, while only numbers change, and between two pictures."""
_NUMBERS = re.compile(r"[\d.,:%\u2580-\u259f\u2800-\u28ff]+| min\b| s\b")
_ALTERNATE = 1049
_WIDTH, _HEIGHT, _MARGIN = 8.43, 18, 14
_LONGEST_S = 900.0
STEPS: tuple[tuple[str, float | None], ...] = (
    ("spr-cluster up --nodes 2 --cloud local", None),
    ("spr-cluster train squad --demo --detach", None),
    ("spr-cluster top", 15.0),
    ("spr-cluster attach", None),
    ("spr-cluster down --yes", None),
)
"""Each command, and after how long ``q`` ends it; its numbers are shown for a third of that."""
_COLORS = {
    "red": "r",
    "green": "g",
    "brown": "y",
    "blue": "b",
    "magenta": "m",
    "cyan": "c",
    "black": "k",
    "brightblack": "k",
}
_STYLE = """
.back { fill: #ffffff; stroke: #d1d9e0 } text { fill: #1f2328; white-space: pre }
.r { fill: #cf222e } .g { fill: #1a7f37 } .y { fill: #7d4e00 } .b { fill: #0969da }
.m { fill: #8250df } .c { fill: #1b7c83 } .k { fill: #59636e } .s { font-weight: bold }
@media (prefers-color-scheme: dark) {
.back { fill: #0d1117; stroke: #3d444d } text { fill: #e6edf3 }
.r { fill: #ff7b72 } .g { fill: #3fb950 } .y { fill: #d29922 } .b { fill: #58a6ff }
.m { fill: #bc8cff } .c { fill: #39c5cf } .k { fill: #9198a1 } }
"""
Row = tuple[tuple[str, str], ...]
"""A line of the terminal: texts with their classes of style."""
Frame = tuple[float, tuple[Row, ...]]


def _row(line: Any) -> Row:
    found: list[tuple[str, str]] = []
    for column in range(COLUMNS):
        cell = line[column]
        name = " ".join(filter(None, (_COLORS.get(cell.fg, ""), "s" if cell.bold else "")))
        if found and (found[-1][1] == name or cell.data == " "):
            found[-1] = (found[-1][0] + cell.data, found[-1][1])
        else:
            found.append((cell.data, name))
    text, name = found[-1]
    found[-1] = (text.rstrip(), name)
    return tuple(each for each in found if each[0])


class Terminal(pyte.Screen):
    """A screen that has a second one, as full-screen programs need."""

    _first: Any = None

    def set_mode(self, *modes: int, **options: Any) -> None:
        super().set_mode(*modes, **options)
        if _ALTERNATE in modes:
            self._first = copy.deepcopy(self.buffer), copy.copy(self.cursor)
            self.erase_in_display(2)

    def reset_mode(self, *modes: int, **options: Any) -> None:
        super().reset_mode(*modes, **options)
        if _ALTERNATE in modes and self._first:
            self.buffer, self.cursor = self._first


class Recorder:
    """A terminal whose pictures are kept, with their seconds in the animation."""

    def __init__(self) -> None:
        self._screen = Terminal(COLUMNS, LINES)
        self._stream = pyte.ByteStream(self._screen)
        self._now = self._waited = 0.0
        self._text = ""
        self.wait_s = _WAIT_S
        self.frames: list[Frame] = []

    def show(self, data: bytes, after_s: float) -> None:
        self._stream.feed(data)
        rows = tuple(_row(self._screen.buffer[n]) for n in range(LINES))
        text = _NUMBERS.sub("", " ".join(part for row in rows for part, _ in row)).replace(" ", "")
        self._waited = 0.0 if text != self._text else self._waited
        self._text = text
        passed = min(after_s, max(0.0, self.wait_s - self._waited))
        self._now, self._waited = self._now + passed, self._waited + passed
        if self.frames and self._now - self.frames[-1][0] < _SETTLE_S and len(self.frames) > 1:
            self.frames[-1] = (self.frames[-1][0], rows)
        elif not self.frames or self.frames[-1][1] != rows:
            self.frames.append((self._now, rows))

    def type(self, command: str) -> None:
        self.show(b"\x1b[0;36m$\x1b[0m ", 0.3)
        for first in range(0, len(command), 3):
            self.show(f"\x1b[1m{command[first : first + 3]}\x1b[0m".encode(), 0.1)
        self.show(b"\r\n", 0.4)

    def run(self, command: str, quit_after_s: float | None, folder: Path) -> None:
        """Run a command to its end; if it fails, exit with what it printed."""
        self.type(command)
        self.wait_s = quit_after_s / 3 if quit_after_s else _WAIT_S
        leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {**os.environ, "TERM": "xterm-256color", "PATH": path}
        process = subprocess.Popen(
            command.split(), stdin=follower, stdout=follower, stderr=follower, cwd=folder, env=env
        )
        os.close(follower)
        for data, after_s in _read(leader, quit_after_s):
            self.show(data, after_s)
        os.close(leader)
        if code := process.wait():
            shown = "\n".join(line.rstrip() for line in self._screen.display)
            sys.exit(f"{command} ended with {code}:\n{shown.rstrip()}")


def _read(leader: int, quit_after_s: float | None) -> Iterator[tuple[bytes, float]]:
    begin = last = time.monotonic()
    while time.monotonic() - begin < _LONGEST_S:
        if select.select([leader], [], [], 0.1)[0]:
            try:
                data = os.read(leader, 1 << 16)
            except OSError:  # the command has ended
                return
            now = time.monotonic()
            yield data, now - last
            last = now
        if quit_after_s and time.monotonic() - begin > quit_after_s:
            os.write(leader, b"q")
            quit_after_s = None
    raise TimeoutError(f"a command took longer than {_LONGEST_S:.0f} s")


def draw(frames: list[Frame]) -> str:
    """Return the animation; each different line is drawn once."""
    last = frames[-1][0] or 1.0
    scale = min(1.0, LENGTH_S / last)
    length = last * scale + END_S
    rows = {
        row: number for number, row in enumerate(dict.fromkeys(r for _, f in frames for r in f))
    }
    height, width = _HEIGHT * LINES + 2 * _MARGIN, _WIDTH * COLUMNS + 2 * _MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" '
        f'height="{height}" font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" '
        'font-size="14">',
        f"<title>{escape('; '.join(command for command, _ in STEPS))}</title>",
        f"<style>{_STYLE}"
        f".film {{ animation: film {length:.2f}s steps(1, end) infinite }}\n@keyframes film {{",
    ]
    lines += [
        f"{100 * at * scale / length:.3f}% {{ transform: translateY(-{number * height}px) }}"
        for number, (at, _) in enumerate(frames)
    ]
    still = (len(frames) - 1) * height
    lines += [
        "}",
        f"@media (prefers-reduced-motion) {{ .film {{ animation: none; "
        f"transform: translateY(-{still}px) }} }}</style><defs>",
    ]
    lines += [
        f'<text id="r{number}">{_draw_row(row)}</text>' for row, number in rows.items() if row
    ]
    lines += [
        f'</defs><rect class="back" x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1}" rx="8"/>',
        f'<svg x="{_MARGIN}" width="{_WIDTH * COLUMNS:.0f}" height="{height}"><g class="film">',
    ]
    for number, (_, shown) in enumerate(frames):
        top = number * height + _MARGIN
        uses = (
            f'<use href="#r{rows[row]}" y="{top + _HEIGHT * (line + 1) - 4}"/>'
            for line, row in enumerate(shown)
            if row
        )
        lines.append("".join(uses))
    return "\n".join([*lines, "</g></svg></svg>", ""])


def _draw_row(row: Row) -> str:
    found, column = [], 0
    for text, name in row:
        kind = f' class="{name}"' if name else ""
        # Each has its own place, so that a font of another width does not move it.
        length = f' textLength="{_WIDTH * len(text):.1f}"' if len(text) > 1 else ""
        found.append(f'<tspan x="{_WIDTH * column:.1f}"{length}{kind}>{escape(text)}</tspan>')
        column += len(text)
    return "".join(found)


def main() -> None:
    target, folder = (Path(each).absolute() for each in sys.argv[1:])
    recorder = Recorder()
    for command, quit_after_s in STEPS:
        print(command, file=sys.stderr, flush=True)
        recorder.run(command, quit_after_s, folder)
    recorder.show(b"\x1b[0;36m$\x1b[0m ", 0.3)
    target.write_text(draw(recorder.frames))
    print(f"{target}: {len(recorder.frames)} pictures, {target.stat().st_size // 1024} kB")


if __name__ == "__main__":
    main()
