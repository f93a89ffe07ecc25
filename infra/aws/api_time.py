"""The time by the cloud's API, which counts where this machine's clock is wrong."""

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
    """``3 h behind the cloud's``, if the cloud's clock is ``ahead`` of this machine's."""
    direction = "behind" if ahead > timedelta() else "ahead of"
    return f"{spoken_duration(abs(ahead).total_seconds())} {direction} the cloud's"


def why_refused(response: Mapping[str, Any]) -> str:
    """Return why AWS refuses this machine's signatures if that is its clock; otherwise ""."""
    ahead = _read_offset(response)
    if ahead is None or abs(ahead) < _REFUSED:
        return ""
    return f"this machine's clock is {describe_offset(ahead)}, so requests are refused"


def _read_offset(response: Mapping[str, Any]) -> timedelta | None:
    """Return how far the cloud was ahead at this response, if it has a date."""
    date = response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    with suppress(TypeError, ValueError):
        return parsedate_to_datetime(date) - local_now()
    return None


class ApiTime:
    """Learns from each response how far the cloud's clock is ahead of this machine's.

    ``on_offset`` receives one warning, at the first accepted request that proves the clock wrong.
    """

    def __init__(self) -> None:
        self.ahead = timedelta()
        self.on_offset: Callable[[str], None] | None = None

    def now(self) -> datetime:
        """Return the time in UTC, by the cloud's clock if this machine's is wrong."""
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
        # The error of a refused request explains itself.
        if self.on_offset and parsed["ResponseMetadata"].get("HTTPStatusCode", 200) < 300:
            warn, self.on_offset = self.on_offset, None
            warn(
                f"warning: this machine's clock is {describe_offset(ahead)}, whose time is used here; "
                f"{FIX_CLOCK}"
            )


API_TIME = ApiTime()
"""Of this process: a machine has one clock."""
