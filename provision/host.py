"""The protocol for a machine over SSH: run commands and copy files."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from infra.errors import DeadlineError, HostError, HostKeyError
from infra.wait import BOOT_DEADLINE_S, Clock, wait_until

SSH_USER = "ubuntu"
CONNECT_TIMEOUT_S = 15
_NO_ANSWER_HINT = (
    "does its subnet have a route to an internet gateway, and is --ssh-cidr this machine's address?"
)


TextSink = Callable[[str], None]
"""Takes one or more whole lines, without the final newline."""


@dataclass(frozen=True)
class Result:
    """The outcome of a command."""

    exit_code: int
    stdout: str
    stderr: str


class Stream(Protocol):
    """A running command. Iterating yields its output lines until it ends or the connection breaks."""

    def send(self, text: str) -> None:
        """Write to its standard input. Raises :class:`HostError` if it has ended."""

    def __iter__(self) -> Iterator[str]: ...

    def close(self) -> None:
        """End its standard input and stop reading, from any thread."""


class Host(Protocol):
    """A machine that runs commands as its login user."""

    @property
    def name(self) -> str: ...

    def run(
        self,
        command: str,
        *,
        timeout_s: float | None = 120,
        check: bool = True,
        on_text: TextSink | None = None,
    ) -> Result:
        """Run a shell command. Raises :class:`HostError` on a non-zero exit unless ``check`` is off.

        ``on_text`` receives stdout and stderr as they arrive.
        """

    def open_stream(self, command: str) -> Stream:
        """Start a long-running shell command, such as `tail -f`."""

    def put(self, content: bytes, path: str, mode: int = 0o600) -> None:
        """Write a file."""

    def upload(self, source: Path, path: str) -> None:
        """Copy a local file, of any size, to the machine."""

    def download(self, command: str) -> Iterator[bytes]:
        """Run a shell command that writes data, of any size, and yield it as it arrives.

        Raises :class:`HostError` at the end if the command fails.
        """

    def close(self) -> None: ...

    def why_gone(self) -> str:
        """Return why the cloud says it will never answer again, such as "terminated"; "" if it may."""


@dataclass(frozen=True)
class Login:
    """How to log in: the private key's path, and the file of known host keys."""

    key_file: Path
    known_hosts: Path
    user: str = SSH_USER


def sudo(script: str) -> str:
    """Render a shell script as one command that runs as root."""
    return f"sudo bash -c {shlex.quote(script)}"


def wait_until_reachable(
    host: Host,
    *,
    deadline_s: float = BOOT_DEADLINE_S,
    clock: Clock | None = None,
    on_wait: Callable[[float, str], None] = lambda _seconds, _reason: None,
) -> None:
    """Wait until a machine answers over SSH.

    Rejected logins are retried, because cloud-init may not have written the key yet. ``on_wait``
    receives the seconds passed and the last reason. Raises :class:`HostKeyError` immediately for a
    changed host key, and :class:`HostError` with the last reason at the deadline.
    """
    last = HostError(host.name, "")

    def answers() -> bool | None:
        nonlocal last
        try:
            host.run("true", timeout_s=CONNECT_TIMEOUT_S)
        except HostKeyError:
            raise
        except HostError as error:
            last = error
            return None
        return True

    try:
        wait_until(
            f"SSH on {host.name}",
            answers,
            deadline_s=deadline_s,
            clock=clock,
            every_s=4,
            on_wait=lambda passed: on_wait(passed, last.message),
        )
    except DeadlineError as error:
        reason = last.message.removeprefix(f"[{host.name}] ")
        hint = last.hint or _NO_ANSWER_HINT
        raise HostError(host.name, f"{error.message}: {reason}", hint=hint) from None
