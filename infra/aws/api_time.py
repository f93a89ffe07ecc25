"""The cloud's time, read from API responses; used when this machine's clock is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime
from typing import Any

from infra.words import spoken_duration

_TOLERATED = timedelta(minutes=2)
# AWS refuses requests that are 5 minutes off: https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv.html
_REFUSED = timedelta(minutes=4)
FIX_CLOCK = "set the clock: sudo timedatectl set-ntp true; `timedatectl` shows its state"


def local_now() -> datetime:
    return datetime.now(timezone.utc)


def describe_offset(ahead: timedelta) -> str:
    """Describe this machine's clock, such as ``3 h behind the cloud's``."""
    direction = "behind" if ahead > timedelta() else "ahead of"
    return f"{spoken_duration(abs(ahead).total_seconds())} {direction} the cloud's"


def why_refused(response: Mapping[str, Any]) -> str:
    """Explain a rejected signature if this machine's clock caused it; otherwise return ""."""
    ahead = _read_offset(response)
    if ahead is None or abs(ahead) < _REFUSED:
        return ""
    return f"this machine's clock is {describe_offset(ahead)}, so AWS rejects its requests"


def _read_offset(response: Mapping[str, Any]) -> timedelta | None:
    """Return how far the cloud's clock is ahead, by a response's date, if it has one."""
    date = response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    with suppress(TypeError, ValueError):
        return parsedate_to_datetime(date) - local_now()
    return None


class ApiTime:
    """Tracks how far the cloud's clock is ahead of this machine's.

    ``on_offset`` receives one warning, at the first accepted request that shows an offset.
    """

    def __init__(self) -> None:
        self.ahead = timedelta()
        self.on_offset: Callable[[str], None] | None = None

    def now(self) -> datetime:
        """Return the current time in UTC, corrected if this machine's clock is wrong."""
        return local_now() + self.ahead

    def learn(self, parsed: Mapping[str, Any], **_: Any) -> None:
        """Handle botocore's event ``after-call``."""
        ahead = _read_offset(parsed)
        if ahead is None:
            return
        if abs(ahead) < _TOLERATED:
            self.ahead = timedelta()
            return
        self.ahead = ahead
        # A rejected request already explains the offset in its error.
        if parsed["ResponseMetadata"].get("HTTPStatusCode", 200) < 300:
            # Several regions are searched at the same time.
            warn, self.on_offset = self.on_offset, None
            if warn:
                warn(
                    f"warning: this machine's clock is {describe_offset(ahead)}; using the cloud's time; "
                    f"{FIX_CLOCK}"
                )


API_TIME = ApiTime()
"""One per process, because a machine has one clock."""
