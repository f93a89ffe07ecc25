"""A machine as the rest of the tool sees it: runs commands, takes files; alone or many at once."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from infra.errors import (
    DeadlineError,
    HostError,
    HostKeyError,
    HostsError,
    SprError,
)
from infra.wait import BOOT_DEADLINE_S, Clock, wait_until

SSH_USER = "ubuntu"
# Measured on 256 hosts: more than about 64 logins at once only wait for each other's cryptography.
FAN_OUT = 64
CONNECT_TIMEOUT_S = 15
_NO_ANSWER_HINT = (
    "does its subnet route to an internet gateway, and is --ssh-cidr this machine's address?"
)


class Named(Protocol):
    """Anything with a machine's name."""

    @property
    def name(self) -> str: ...


T = TypeVar("T")
N = TypeVar("N", bound=Named)
LineSink = Callable[[str], None]


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    exit_code: int
    stdout: str
    stderr: str


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
        on_line: LineSink | None = None,
    ) -> Result:
        """Run a shell command. Raises :class:`HostError` on a non-zero exit unless ``check`` is off.

        ``on_line`` receives each line of output and error output as it comes.
        """

    def put(self, content: bytes, path: str, mode: int = 0o600) -> None:
        """Write a file."""

    def upload(self, source: Path, path: str) -> None:
        """Copy a local file, of any size, to the machine."""

    def download(self, path: str, target: Path) -> None:
        """Copy a file of the machine here."""

    def close(self) -> None: ...

    def why_gone(self) -> str:
        """Why it will never answer again, as the cloud says; "" where it may."""


@dataclass(frozen=True)
class Login:
    """How to enter a machine: the key's path, and the file of known host keys."""

    key_file: Path
    known_hosts: Path
    user: str = SSH_USER


def sudo(script: str) -> str:
    """A shell script as one command that root runs."""
    return f"sudo bash -c {shlex.quote(script)}"


def on_all(
    what: str, hosts: Iterable[N], work: Callable[[N], T], *, hint: str | None = None
) -> dict[str, T]:
    """Do the same on many machines at once; returns the results by machine name.

    Raises :class:`HostsError` with every failed machine's outcome; without a ``hint`` of its own it
    has that of the first machine that has one. A :class:`HostKeyError` is raised as it is, since it
    weighs more than whatever else went wrong.
    """
    targets = tuple(hosts)
    if not targets:
        return {}
    failures: dict[str, str] = {}
    wrong_key: HostKeyError | None = None
    done: dict[str, T] = {}
    pool = ThreadPoolExecutor(min(FAN_OUT, len(targets)))
    try:
        futures = {host.name: pool.submit(work, host) for host in targets}
        for name, future in futures.items():
            try:
                done[name] = future.result()
            except HostKeyError as error:
                wrong_key = wrong_key or error
            except SprError as error:
                failures[name] = error.message.removeprefix(f"[{name}] ")
                hint = hint or error.hint
    finally:
        # Ctrl-C must not wait for machines that take twenty minutes to answer.
        pool.shutdown(wait=False, cancel_futures=True)
    if wrong_key:
        raise wrong_key
    if failures:
        raise HostsError(
            f"{what} failed on {len(failures)} of {len(targets)} nodes", failures, hint=hint
        )
    return done


def wait_until_reachable(
    host: Host,
    *,
    deadline_s: float = BOOT_DEADLINE_S,
    clock: Clock | None = None,
    on_wait: Callable[[float, str], None] | None = None,
) -> None:
    """Wait until a machine answers over SSH.

    A refused login is waited out, too: cloud-init may not have placed the key yet. ``on_wait`` is
    told the seconds passed and the last reason. Raises :class:`HostKeyError` at once for a changed
    host key, else in the end :class:`HostError` with the last reason.
    """
    knock = _Knock(host)

    def report(passed: float) -> None:
        if on_wait:
            on_wait(passed, knock.reason)

    try:
        wait_until(
            f"SSH on {host.name}",
            knock,
            deadline_s=deadline_s,
            clock=clock,
            every_s=4,
            on_wait=report,
        )
    except DeadlineError as error:
        raise HostError(
            host.name,
            f"{error.message}: {knock.reason.removeprefix(f'[{host.name}] ')}",
            hint=knock.hint or _NO_ANSWER_HINT,
        ) from None


@dataclass
class _Knock:
    """Whether a machine answers, and the last reason why it did not."""

    host: Host
    reason: str = ""
    hint: str | None = None

    def __call__(self) -> bool | None:
        try:
            return self.host.run("true", timeout_s=CONNECT_TIMEOUT_S).exit_code == 0
        except HostKeyError:
            raise
        except HostError as error:
            self.reason, self.hint = error.message, error.hint
            return None
