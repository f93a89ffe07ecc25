"""Parts of lines of text for a terminal: styles, bars, short figures. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from rich.text import Text

GOOD, SLOW, BAD, DIM, HEAD = "green", "yellow", "bold red", "dim", "bold"
WIDE = 120
_EIGHTHS = " ▏▎▍▌▋▊▉"


def bar(share: float, width: int) -> str:
    """Return a bar, full to an eighth of a cell, for a share from 0 to 1."""
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    full, part = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[part] if part else "")).ljust(width)


def format_rate(rate: float) -> str:
    """Return a number of bytes in at most five characters: ``980``, ``1.2k``, ``34M``, ``5.6G``."""
    for unit in ("", "k", "M", "G"):
        if rate < 999.5 or unit == "G":
            return f"{rate:.1f}{unit}" if unit and rate < 9.95 else f"{rate:.0f}{unit}"
        rate /= 1000
    raise AssertionError


def format_step(seconds: float) -> str:
    """Return the time of a step: ``431 ms``, ``12.3 s``."""
    return f"{1000 * seconds:.0f} ms" if seconds < 9.9995 else f"{seconds:.1f} s"


def clean_text(text: str) -> str:
    """Return text from elsewhere without what could move the cursor."""
    return "".join(each if each.isprintable() else "?" for each in text)


def join(parts: Iterable[Text], width: int) -> Text:
    """Return one line with as many parts, from the first on, as it has room for."""
    line = Text()
    for part in parts:
        if part and line and line.cell_len + 2 + part.cell_len > width:
            break
        line = Text.assemble(line, "  " if part and line else "", part)
    return fit(line, width)


def fit(line: Text, width: int) -> Text:
    """Cut or pad a line to a number of cells."""
    line.truncate(width, overflow="ellipsis", pad=True)
    return line
