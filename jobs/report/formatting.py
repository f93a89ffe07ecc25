"""Text for numbers, money, and durations. Pure."""

from __future__ import annotations

import math


def format_fact(value: object) -> str:
    """Format any value of a results file, shortened."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}" if abs(value) < 10**15 else "?"
    text = "–" if value is None else str(value)
    return text if len(text) <= 500 else f"{text[:499]}…"


def format_number(value: float) -> str:
    """Format with four significant digits; a dash if the value is not finite."""
    return f"{value:.4g}" if math.isfinite(value) else "–"


def format_usd(value: float) -> str:
    """``$3.16``; small amounts with two significant digits."""
    return f"${value:,.2f}" if value >= 0.1 else f"${value:.2g}"


def format_duration(seconds: float) -> str:
    """``0.42 s``, ``41.9 s``, ``7 min 30 s`` or ``3 h 30 min``."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


def time_unit(span: float) -> tuple[float, str]:
    """Return the divisor for seconds on an axis up to ``span``, and the title of the unit."""
    if span < 180:
        return 1.0, "seconds of training"
    return (60.0, "minutes of training") if span < 10_800 else (3600.0, "hours of training")
