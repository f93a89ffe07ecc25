"""Every error a user can meet, as one shallow tree.

    SprError                    exit code 1: something outside our control failed
    ├── UsageError              exit code 2: what was asked for is wrong; nothing was changed
    ├── CloudError              an AWS (or embedded cloud) call failed
    ├── DeadlineError           something did not happen in its time
    ├── HostError               a command on one machine failed
    │   ├── HostKeyError        a machine shows another SSH host key than before
    │   └── ConnectionLostError the connection broke; the command may still run
    ├── HostsError              commands on several machines failed; carries every machine's outcome
    └── JobError                a training job failed

A message says what failed, on which resource or ``[host]``, and what to do next.
"""

from __future__ import annotations

from collections.abc import Mapping


class SprError(Exception):
    """A failure with a message for the user; never shown with a traceback."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  → {self.hint}" if self.hint else self.message


class UsageError(SprError):
    """What the user asked for can't be done as asked; nothing was changed."""

    exit_code = 2


class CloudError(SprError):
    """A call to the cloud failed. ``code`` is EC2's own error code where there is one."""

    def __init__(self, message: str, *, code: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code


class DeadlineError(SprError):
    """Something that was waited for did not happen in time."""


class HostError(SprError):
    """A command failed on one machine, named in the message."""

    def __init__(self, host: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(f"[{host}] {message}", hint=hint)
        self.host = host


class HostKeyError(HostError):
    """A machine shows another host key than the one that was pinned."""


class ConnectionLostError(HostError):
    """The connection to a machine broke under a command, which may still run there."""


class HostsError(SprError):
    """The same work failed on some of several machines."""

    def __init__(self, what: str, outcomes: Mapping[str, str], *, hint: str | None = None) -> None:
        lines = "".join(f"\n  [{host}] {outcome}" for host, outcome in outcomes.items())
        super().__init__(f"{what}:{lines}", hint=hint)
        self.outcomes = dict(outcomes)


class JobError(SprError):
    """A training job ended without its result."""
