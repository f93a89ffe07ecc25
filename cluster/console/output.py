"""Output and questions of commands: text or JSON. Lines wrap at spaces, never inside a command."""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TextIO

from cluster.console.options import Request
from infra.errors import UsageError

# A command in backticks, or an spr-cluster command with its options.
_COMMAND = re.compile(
    r"`[^`]+`|spr-cluster (?:(?:train|study|tune|scaling) )?[a-z][a-z-]*(?: \S+-\d{8}-\d{6}-\w+\b)*"
    r"(?: --[\w-]+(?: [^\s-]\S*)?)*"
)
_NO_BREAK = "\N{NO-BREAK SPACE}"
_may_ask = False
_pause: Callable[[], AbstractContextManager[None]] = nullcontext
# An incomplete sequence is harmless without its end.
_ESCAPE = re.compile(r"\x1b(?:[\]PX^_].*?(?:\x07|\x1b\\|$)|\[[0-?]*[ -/]*[@-~]?|[ -/]*[0-~]?)")


def printable(text: str, stream: TextIO | None = None) -> str:
    """Strip a line of sequences that would move the cursor or change a terminal's title or colors.

    For a ``stream`` that is not a terminal, the line is unchanged.
    """
    if text.isprintable() or (stream is not None and not stream.isatty()):
        return text
    clean = _ESCAPE.sub("", text.expandtabs())
    return "".join(each if each.isprintable() else " " * each.isspace() for each in clean)


def terminal_width(stream: TextIO) -> int | None:
    """Return the terminal's width in columns; ``None`` if the stream is not a terminal."""
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
    # The terminal itself wraps longer commands, so they can be copied as one line.
    together = _COMMAND.sub(lambda command: command[0].replace(" ", _NO_BREAK), line)
    filled = textwrap.fill(
        together,
        width,
        subsequent_indent=" " * (len(line) - len(line.lstrip(" ")) + indent),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return filled.replace(_NO_BREAK, " ")


def emit(request: Request, text: str | Callable[[], str], data: object) -> None:
    """Print a command's result: with ``--json`` the data, otherwise the text, unless it is empty.

    Pass a function if rendering the text may fail: ``--json`` does not call it. The request's ``sink``
    receives the data, and nothing is printed.
    """
    if request.sink is not None:
        request.sink(data)
        return
    shown = json.dumps(data) if request.json else text if isinstance(text, str) else text()
    if shown:
        print(shown)


def say(text: str) -> None:
    """Print a message on stderr, apart from the command's result."""
    print(wrap(text, stream=sys.stderr), file=sys.stderr, flush=True)


def allow_questions() -> None:
    """Let commands ask questions: this process is the command line, not a program that calls them."""
    global _may_ask
    _may_ask = True


def has_terminal() -> bool:
    """Return whether a user can answer questions."""
    return _may_ask and sys.stdin.isatty() and sys.stdout.isatty()


def pause_for_questions(pause: Callable[[], AbstractContextManager[None]]) -> None:
    """Set what leaves the terminal to a question: a live display would draw over it."""
    global _pause
    _pause = pause


def ask_for(what: str) -> str:
    """Ask for a line of text on the terminal."""
    with _pause():
        print(f"{what} ", end="", file=sys.stderr, flush=True)
        return sys.stdin.readline().strip()


def ask(question: str) -> bool:
    """Ask a yes-or-no question; without a terminal, the answer is no."""
    return has_terminal() and ask_for(f"{question} [y/N]").lower() in ("y", "yes")


def confirm(question: str, *, yes: bool, about: str = "") -> None:
    """Ask on a terminal. Raises :class:`UsageError` if the answer is no or there is no terminal.

    ``about`` is what the user has to know, such as the price, for the error.
    """
    if yes:
        return
    if not has_terminal():
        what = "this needs confirmation, but there is no terminal"
        hint = "--yes confirms" if _may_ask else "yes=True confirms"
        raise UsageError(f"{what}: {about}" if about else what, hint=hint)
    if not ask(question):
        raise UsageError("not confirmed; nothing was changed")
