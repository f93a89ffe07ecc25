"""A message while AWS fails to serve requests: botocore retries for a minute or longer without saying so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Calls that are only for information have fewer attempts.
_SAID_AT = 3


class Outage:
    """Handles botocore's event ``needs-retry``. ``on_wait`` receives one message."""

    def __init__(self) -> None:
        self.on_wait: Callable[[str], None] | None = None

    def notice(
        self, response: Any, caught_exception: Exception | None, attempts: int, **_: Any
    ) -> None:
        """Report a request that failed several times. Raises an error that retries cannot fix."""
        if caught_exception and is_about_certificate(caught_exception):
            raise caught_exception
        # AWS answers that it is busy, or it does not answer.
        why = response[1].get("Error", {}).get("Code") if response else caught_exception
        if why and attempts >= _SAID_AT:
            # Several regions are searched at the same time.
            say, self.on_wait = self.on_wait, None
            if say:
                say(f"requests to AWS fail, retrying: {why}")


def is_about_certificate(error: BaseException) -> bool:
    """Return whether this machine does not trust the server's certificate."""
    return "CERTIFICATE_VERIFY_FAILED" in str(error)


OUTAGE = Outage()
"""One per process, because a machine has one network."""
