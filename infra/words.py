"""Human-readable numbers, sizes, and times, and one-line explanations of invalid input."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from infra.errors import UsageError

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError


def counted(count: int, noun: str) -> str:
    """``1 node``, ``4 nodes``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_size(count: int) -> str:
    """Return a size such as ``512 bytes`` or ``3.4 MiB``."""
    if count < 1 << 10:
        return f"{count} bytes"
    shift, unit = next(
        (shift, unit)
        for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB"))
        if count >= 1 << shift
    )
    return f"{count / (1 << shift):.1f} {unit}"


def spoken_time(time: datetime, now: datetime) -> str:
    """``05:49 UTC (in 8 h)``, with the date unless that is today; ``--json`` uses ``render_time``."""
    today = now.astimezone(timezone.utc).date()
    return f"{spoken_day(time, today)} (in {spoken_duration((time - now).total_seconds())})"


def spoken_day(time: datetime, today: date | None = None) -> str:
    """``Nov 22 at 05:49 UTC``, or ``05:49 UTC`` if that is ``today``."""
    time = time.astimezone(timezone.utc)
    day = "" if time.date() == today else f"{time:%b} {time.day} at "
    return f"{day}{time:%H:%M} UTC"


def spoken_duration(seconds: float) -> str:
    """``20 s``, ``1 min 31 s``, ``45 min``, ``7 h 40 min``, ``8 h``, or ``3 days``."""
    is_short = seconds < 600
    larger, rest = divmod(max(0, round(seconds if is_short else seconds / 60)), 60)
    if larger >= 48 and not is_short:
        return f"{round(seconds / 86400)} days"
    units = ("min", "s") if is_short else ("h", "min")
    parts = [f"{n} {unit}" for n, unit in zip((larger, rest), units, strict=True) if n]
    return " ".join(parts) or "0 s"


# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/Using_Tags.html#tag-restrictions
_NOT_IN_TAGS = re.compile(r"[^\w +\-=.:/@]")
LONGEST_TAG = 256


def tag_value(text: str) -> str:
    """Turn text into a valid AWS tag value: replace forbidden characters and truncate."""
    return _NOT_IN_TAGS.sub("_", text)[:LONGEST_TAG]


_DURATION = re.compile(r"(\d+(?:\.\d+)?)(m|h|d)", re.ASCII)
_UNITS = {"m": "minutes", "h": "hours", "d": "days"}


def parse_duration(text: str, option: str) -> timedelta:
    """Parse a duration such as ``90m``, ``8h``, or ``2d``. Raises :class:`UsageError`."""
    match = _DURATION.fullmatch(text.strip())
    if not match:
        raise UsageError(f"{option} {text!r}: expected a duration such as 90m, 8h, or 2d")
    try:
        return timedelta(**{_UNITS[match[2]]: float(match[1])})
    except OverflowError:
        raise UsageError(f"{option} {text}: expected at most 30d") from None


def render_duration(time: timedelta) -> str:
    """Render a duration for :func:`parse_duration`, in the largest whole unit."""
    minutes = time.total_seconds() / 60
    for unit, size in (("d", 1440), ("h", 60)):
        if minutes >= size and minutes % size == 0:
            return f"{minutes / size:.0f}{unit}"
    # Fixed-point, because parse_duration reads no exponents.
    return f"{minutes:.5f}".rstrip("0").rstrip(".") + "m"


_PREFIX = re.compile(r"^(Value error, |Input should be )")


def nearest(name: str, names: Iterable[str], count: int = 1, cutoff: float = 0.6) -> str:
    """``; did you mean NAME?`` for the closest names; empty if none is close."""
    near = difflib.get_close_matches(name, list(names), count, cutoff)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def explain_invalid(
    error: ValidationError,
    model: type[BaseModel],
    *,
    expected: Mapping[str, str] | None = None,
    render: Callable[[str, Any], str] = "{} = {!r}".format,
) -> str:
    """Describe the first validation error in one line.

    ``expected`` describes valid values by top-level key; pydantic's message is the fallback.
    ``render`` formats a key and its value the way the user typed them.
    """
    first = error.errors()[0]
    # For a union, pydantic adds the name of the branch that failed.
    path = [part for part in first["loc"] if part not in ("int", "str")]
    key = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")
    known = (expected or {}).get(str(path[0]), "")
    if first["type"] == "extra_forbidden":
        meant = nearest(key, model.model_fields)
        return f"unknown key {key}{meant or '; expected ' + ', '.join(model.model_fields)}"
    if first["type"] == "missing":
        return f"{key} is missing" + (f": expected {known}" if known else "")
    message, value = _PREFIX.sub("", first["msg"]), first["input"]
    is_choice = first["type"] == "literal_error" and isinstance(value, str)
    meant = nearest(value, re.findall("'(.+?)'", message)) if is_choice else ""
    return f"{render(key, value)}: expected {known or message}{meant}"
