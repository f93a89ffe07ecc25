"""A message while AWS does not answer: botocore retries for a minute or longer without reporting it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Calls that are only for information have fewer attempts.
_SAID_AT = 3


class Outage:
    """Handles botocore's event ``needs-retry``. ``on_wait`` receives one message."""

    def __init__(self) -> None:
        self.on_wait: Callable[[str], None] | None = None

    def notice(self, caught_exception: Exception | None, attempts: int, **_: Any) -> None:
        """Report a request that failed several times. Raises an error that retries cannot fix."""
        if caught_exception is None:
            return
        if is_about_certificate(caught_exception):
            raise caught_exception
        if attempts >= _SAID_AT:
            # Several regions are searched at the same time.
            say, self.on_wait = self.on_wait, None
            if say:
                say(f"no answer from AWS, retrying: {caught_exception}")


def is_about_certificate(error: BaseException) -> bool:
    """Return whether this machine does not trust the server's certificate."""
    return "CERTIFICATE_VERIFY_FAILED" in str(error)


OUTAGE = Outage()
"""One per process, because a machine has one network."""
