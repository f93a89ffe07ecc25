"""File access. For any file content, a reader returns a value or raises UsageError.

Readers accept only regular files of limited size: a pipe would block, and a device never ends.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pydantic import TypeAdapter, ValidationError

from infra.errors import UsageError
from infra.words import format_size

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")
# Building an adapter takes milliseconds.
_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)
MAX_BYTES = 64 << 20
"""The largest file that :func:`read_text` accepts by default."""
_MAX_DEPTH = 100
# tomllib's time and memory for a dotted key grow with the square of its parts.
_DEEP_KEY = re.compile(
    rf"""(?m)^[ \t\[]*(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){{{_MAX_DEPTH}}}"""
)
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_file(path: Path, max_bytes: int | None = None) -> None:
    """Raise :class:`UsageError` if a file is missing, too large, a pipe, a socket, or a device."""
    try:
        found = path.stat()
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    if kind := _KINDS.get(stat.S_IFMT(found.st_mode)):
        raise UsageError(
            f"{path}: is {kind}", hint="save its content to a regular file and use that instead"
        )
    if max_bytes is not None and found.st_size > max_bytes:
        raise UsageError(
            f"{path}: file is too large: {format_size(found.st_size)}, "
            f"limit {format_size(max_bytes)}"
        )


def check_folder(folder: Path) -> None:
    """Apply :func:`check_file` to every file in a folder."""
    for below, _, names in os.walk(folder):
        for name in names:
            check_file(Path(below, name))


def read_text(
    path: Path, missing: str | None = None, *, errors: str = "strict", max_bytes: int = MAX_BYTES
) -> str:
    """Return the text of a UTF-8 file, or ``missing``, if given, when there is no file.

    Raises :class:`UsageError`.
    """
    try:
        if missing is not None and not path.exists():
            return missing
        check_file(path, max_bytes)
        with path.open(encoding="utf-8-sig", errors=errors) as file:
            return file.read(max_bytes)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None


def read_lines(path: Path, max_bytes: int) -> Iterator[str]:
    """Yield a file's lines with invalid characters replaced. Raises :class:`UsageError`."""
    check_file(path, max_bytes)
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            yield from file
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError | ValueError) -> UsageError:
    if isinstance(error, UnicodeDecodeError):
        more = ", but UTF-16" * (error.object[:2] in (b"\xff\xfe", b"\xfe\xff"))
        return UsageError(f"{path}: not UTF-8 (byte {error.start}){more}")
    why = error.strerror if isinstance(error, OSError) else error
    return UsageError(f"{path}: can't be read: {why}")


def parse_object(text: str, name: str) -> dict[str, Any]:
    """Parse a JSON object; messages start with ``name``. Raises :class:`UsageError`."""
    try:
        content = _shallow(json.loads(text), name)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise UsageError(f"{name}: not JSON: {error.msg} ({where})") from None
    except ValueError:
        raise UsageError(f"{name}: a number has too many digits") from None
    except RecursionError:
        raise _too_deep(name) from None
    if not isinstance(content, dict):
        raise UsageError(f"{name}: expected a JSON object")
    return content


def read_object(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """Read a JSON object. A missing ``optional`` file yields ``{}``. Raises :class:`UsageError`."""
    return parse_object(read_text(path, "{}" if optional else None), str(path))


def parse_as(kind: type[T], text: str, name: str) -> T:
    """Parse JSON into a dataclass; messages start with ``name``. Raises :class:`UsageError`."""
    try:
        found: T = _adapter(kind).validate_json(text.encode(errors="replace"))
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"{part}: " for part in first["loc"])
        raise UsageError(f"{name}: {place}{first['msg']}") from None
    return found


def parse_toml(text: str, name: str) -> dict[str, Any]:
    """Parse TOML; messages start with ``name``. Raises :class:`UsageError`."""
    if _DEEP_KEY.search(text):
        raise _too_deep(name)
    try:
        content: dict[str, Any] = _shallow(tomllib.loads(text), name)
    except ValueError as error:
        raise UsageError(f"{name}: not TOML: {error}") from None
    except RecursionError:
        raise _too_deep(name) from None
    return content


def _shallow(content: Any, name: str) -> Any:
    """Return the document. Raises :class:`UsageError` for one that could be parsed, but not copied."""
    level = [content] if isinstance(content, dict | list) else []
    for _ in range(_MAX_DEPTH):
        parts = [each.values() if isinstance(each, dict) else each for each in level]
        level = [below for part in parts for below in part if isinstance(below, dict | list)]
        if not level:
            return content
    raise _too_deep(name)


def _too_deep(name: str) -> UsageError:
    return UsageError(f"{name}: nested more than {_MAX_DEPTH} levels deep")


def write_private(path: Path, content: str) -> None:
    """Atomically write a file that only its owner can read."""
    with open_private(path) as file:
        file.write(content.encode())


@contextmanager
def open_private(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that atomically replaces this one; only its owner can read it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    fresh.touch(mode=0o600, exist_ok=False)
    try:
        with fresh.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException:
        # A partial file would keep a full disk full.
        fresh.unlink(missing_ok=True)
        raise
