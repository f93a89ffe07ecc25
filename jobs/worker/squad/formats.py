"""What a file is that should be JSON and isn't, as far as its first bytes tell."""

from __future__ import annotations

import json

_MAGIC = {
    b"\x1f\x8b": "is compressed by gzip: unpack it first",
    b"PK\x03\x04": "is a zip archive: unpack it first",
    b"PAR1": "is a Parquet file",
    b"\xff\xfe": "is UTF-16, not UTF-8",
    b"\xfe\xff": "is UTF-16, not UTF-8",
}
_SHOWN = 60


def recognise(content: bytes) -> str | None:
    """What these bytes are instead of one JSON document, as the end of a sentence about the file."""
    for magic, meaning in _MAGIC.items():
        if content.startswith(magic):
            return meaning
    if b"\0" in content:
        return "holds NUL bytes, so it is no text: was its copying cut short?"
    lines = [line for line in content.decode("utf-8-sig", "replace").splitlines() if line.strip()]
    if content.lstrip().startswith(b"<"):
        return "is HTML or XML: a web page instead of the data, perhaps"
    if len(lines) > 1 and _is_object(lines[0]) and _is_object(lines[1]):
        return "is JSON lines (an object per line); SQuAD's layout is one object with 'data'"
    if lines and any(lines[0].count(mark) >= 2 for mark in ",;\t") and lines[0][0] not in "{[":
        return f"looks like CSV (its first line: {show(lines[0])}); SQuAD's layout is JSON"
    return None


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def show(text: str) -> str:
    """A text in quotes, cut where it would make a message unreadable."""
    return repr(text) if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]!r}…"
