"""Figures in words: numbers, sums of money, durations. Pure."""

from __future__ import annotations

import math


def format_fact(value: object) -> str:
    """A value of a file, in few words."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}" if abs(value) < 10**15 else "?"
    text = "–" if value is None else str(value)
    return text if len(text) <= 500 else f"{text[:499]}…"


def format_number(value: float) -> str:
    """Four digits, or a dash for what is not a number."""
    return f"{value:.4g}" if math.isfinite(value) else "–"


def format_usd(value: float) -> str:
    """``$3.16``; small sums with two digits that count."""
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
    """What to divide seconds by for an axis up to ``span`` of them, and the unit's name."""
    if span < 180:
        return 1.0, "seconds of training"
    return (60.0, "minutes of training") if span < 10_800 else (3600.0, "hours of training")
