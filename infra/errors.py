"""The tree of user-facing errors.

    SprError                    exit code 1: a failure outside our control
    ├── UsageError              exit code 2: usage error; nothing changed
    │   ├── MissingExtraError   an optional Python package is not installed
    │   └── NoClusterError      no cluster of that name is running
    ├── CloudError              a call to AWS or the embedded cloud failed
    │   └── NoCapacityError     EC2 refused every purchase offer
    ├── DeadlineError           a wait timed out
    ├── HostError               a command on one machine failed
    │   ├── HostKeyError        a machine's SSH host key changed
    │   ├── NoAnswerError       a machine does not answer over SSH
    │   │   └── JumpError       the --jump route to a machine failed
    │   └── ConnectionLostError the SSH connection broke; the command may still run
    ├── HostsError              commands on several machines failed; carries every outcome
    └── JobError                a training job failed

A message says what failed, on which resource or ``[host]``, and what to do next.
"""

from __future__ import annotations

from collections.abc import Mapping


class SprError(Exception):
    """A failure with a message and a hint for the user; shown without a traceback."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  → {self.hint}" if self.hint else self.message


class UsageError(SprError):
    """The request is invalid; nothing changed."""

    exit_code = 2


class MissingExtraError(UsageError):
    """An optional Python package is not installed; ``extra`` of pyproject.toml installs it."""

    def __init__(self, message: str, extra: str) -> None:
        install = f"install '.[{extra}]'"
        where = "in spr-cluster's source folder"
        super().__init__(
            message, hint=f"{where}: pip {install}; with pipx: pipx runpip spr-cluster {install}"
        )


class NoClusterError(UsageError):
    """No cluster of that name is running.

    ``bucket`` is where it stored its jobs, as far as EC2 knows; ``flag`` is the option for its cloud.
    With ``is_gone``, EC2 lists none of its machines, not even a stopped one.
    """

    def __init__(
        self, message: str, hint: str, bucket: str = "", flag: str = "", *, is_gone: bool = False
    ) -> None:
        stored = f"its jobs are in {bucket}: spr-cluster jobs {bucket}{flag}; " if bucket else ""
        super().__init__(message, hint=f"{stored}{hint}")
        self.bucket, self.is_gone = bucket, is_gone


class CloudError(SprError):
    """A call to the cloud failed. ``code`` is EC2's error code, if any."""

    def __init__(self, message: str, *, code: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code


class DeadlineError(SprError):
    """A wait timed out."""


class HostError(SprError):
    """A command failed on the machine that the message names."""

    def __init__(self, host: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(f"[{host}] {message}", hint=hint)
        self.host = host


class HostKeyError(HostError):
    """A machine's host key differs from the pinned one."""


class NoAnswerError(HostError):
    """A machine does not answer over SSH."""


class JumpError(NoAnswerError):
    """The ``--jump`` route to a machine failed; the machine itself may be fine."""


class ConnectionLostError(HostError):
    """The connection broke during a command, which may still be running."""


class HostsError(SprError):
    """The same command failed on some of several machines."""

    def __init__(self, what: str, outcomes: Mapping[str, str], *, hint: str | None = None) -> None:
        lines = "".join(f"\n  [{host}] {outcome}" for host, outcome in outcomes.items())
        super().__init__(f"{what}:{lines}", hint=hint)
        self.outcomes = dict(outcomes)


class JobError(SprError):
    """A job ended without a result."""


class HangupError(KeyboardInterrupt):
    """SIGHUP, usually because the terminal closed. Like Ctrl-C, except that jobs keep running."""

    exit_code = 129
