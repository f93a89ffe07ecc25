"""The options of generated text, for `predict` and for requests to `serve`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cluster.console.options import parse_number, positive_int


def temperature(text: str) -> float:
    """Parse 0, or a number from 0.01 to 100. Raises ``ValueError``."""
    expected = "0, or a number from 0.01 to 100"
    return parse_number(text, lambda found: found == 0 or 0.01 <= found <= 100, expected)


def seed(text: str) -> int:
    """Parse a seed of random numbers. Raises ``ValueError``."""
    if not text.isdecimal() or not int(text) < 2**31:
        raise ValueError(f"{text!r}: expected a whole number from 0 to {2**31 - 1}")
    return int(text)


def share(text: str) -> float:
    """Parse a number above 0, at most 1. Raises ``ValueError``."""
    return parse_number(text, lambda found: 0 < found <= 1, "a number above 0, at most 1")


PARSERS: Mapping[str, Callable[[str], Any]] = {
    "max_new_tokens": positive_int,
    "temperature": temperature,
    "top_p": share,
    "seed": seed,
}
_SAMPLING = ("top_p", "seed")
"""What has no effect without a temperature."""


def read_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in a JSON object, without those that are null. Raises ``ValueError``."""
    found = dict[str, Any]()
    for name, value in given.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{name}: expected a number")
        try:
            found[name] = PARSERS[name](repr(value))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    useless = [name for name in _SAMPLING if name in found]
    if useless and "temperature" not in found:
        raise ValueError(f"{useless[0]}: has no effect without temperature")
    return found
