"""Wrapping of messages for a terminal: at spaces only, never within a command."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from typing import TextIO

# A command in backticks, or one of ours with its options.
_COMMAND = re.compile(
    r"`[^`]+`|spr-cluster [a-z-]+(?: (?:squad|digits|\S+-\d{8}-\d{6}-\w+)\b)*"
    r"(?: --[\w-]+(?: [^\s-]\S*)?)*"
)
_NO_BREAK = "\N{NO-BREAK SPACE}"


# The rest of one that is not complete can't do anything.
_ESCAPE = re.compile(r"\x1b(?:[\]PX^_].*?(?:\x07|\x1b\\|$)|\[[0-?]*[ -/]*[@-~]?|[ -/]*[0-~]?)")


def printable(text: str, stream: TextIO | None = None) -> str:
    """Return a line without what would move a terminal's cursor, or change its title or colors.

    A ``stream`` that is not a terminal gets all of it.
    """
    if text.isprintable() or (stream is not None and not stream.isatty()):
        return text
    clean = _ESCAPE.sub("", text.expandtabs())
    return "".join(each if each.isprintable() else " " * each.isspace() for each in clean)


def terminal_width(stream: TextIO) -> int | None:
    """Return a terminal's width in columns; ``None`` if the stream is not a terminal."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def wrap(text: str, indent: int = 2, stream: TextIO | None = None) -> str:
    """Wrap long lines for a terminal (default: stdout); continuation lines are indented."""
    width = terminal_width(stream or sys.stdout)
    if width is None:
        return text
    return "\n".join(_wrap_line(printable(line), width, indent) for line in text.split("\n"))


def _wrap_line(line: str, width: int, indent: int) -> str:
    if len(line) <= width:
        return line
    hanging = " " * (len(line) - len(line.lstrip(" ")) + indent)

    def keep_together(command: re.Match[str]) -> str:
        # One that is longer than a line is left to the terminal: it copies it as one line.
        return command[0].replace(" ", _NO_BREAK)

    filled = textwrap.fill(
        _COMMAND.sub(keep_together, line),
        width,
        subsequent_indent=hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return filled.replace(_NO_BREAK, " ")
