"""Words that depend on a number, a size, or a time."""

from __future__ import annotations

from datetime import date, datetime, timezone


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
    """``05:49 UTC (in 8 h)``, with the date on another day; for ``--json`` use ``render_time``."""
    today = now.astimezone(timezone.utc).date()
    return f"{spoken_day(time, today)} (in {spoken_duration((time - now).total_seconds())})"


def spoken_day(time: datetime, today: date | None = None) -> str:
    """``Nov 22 at 05:49 UTC``, or ``05:49 UTC`` if that is ``today``."""
    time = time.astimezone(timezone.utc)
    day = "" if time.date() == today else f"{time:%b} {time.day} at "
    return f"{day}{time:%H:%M} UTC"


def spoken_duration(seconds: float) -> str:
    """``45 min``, ``7 h 40 min``, ``8 h``, or ``3 days``."""
    hours, minutes = divmod(max(0, round(seconds / 60)), 60)
    if hours >= 48:
        return f"{round(seconds / 86400)} days"
    parts = [f"{hours} h"] if hours else []
    parts += [f"{minutes} min"] if minutes or not hours else []
    return " ".join(parts)
