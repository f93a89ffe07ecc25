"""A machine over SSH: the one door through which every command and file goes."""

from __future__ import annotations

import io
import logging
import shlex
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import paramiko
from fabric import Config, Connection
from fabric.runners import Remote
from invoke.exceptions import CommandTimedOut

from infra.errors import (
    ConnectionLostError,
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
_CONNECT_TIMEOUT_S = 15
_KEEPALIVE_S = 20
_PORT = 22

# paramiko's exit code where the connection ended before the command did.
_NO_EXIT_CODE = -1
# It writes tracebacks of its own for connections that a booting machine refuses; we tell the reason.
logging.getLogger("paramiko").setLevel(logging.CRITICAL)

T = TypeVar("T")
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


@dataclass(frozen=True)
class Login:
    """How to enter a machine: the key's path, and the file of known host keys."""

    key_file: Path
    known_hosts: Path
    user: str = SSH_USER


class _LearnOnce(paramiko.MissingHostKeyPolicy):
    """Pins a host's key at the first contact. A key that changes later is refused by paramiko."""

    _lock = threading.Lock()

    def __init__(self, known_hosts: Path) -> None:
        self._known_hosts = known_hosts

    def missing_host_key(self, client: Any, hostname: str, key: paramiko.PKey) -> None:
        line = f"{hostname} {key.get_name()} {key.get_base64()}\n"
        with self._lock, self._known_hosts.open("a") as file:
            file.write(line)
        client.get_host_keys().add(hostname, key.get_name(), key)


class _InterruptibleRun(Remote):
    """fabric's way to run a command, but Ctrl-C ends it at once, not when the command does."""

    def send_interrupt(self, interrupt: KeyboardInterrupt) -> None:
        # Without this, fabric's readers wait for the end of the remote command's output.
        self.channel.close()
        raise interrupt


class _Lines(io.TextIOBase):
    """A text stream that hands on whole lines."""

    def __init__(self, sink: LineSink) -> None:
        self._sink, self._rest = sink, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._sink(line.rstrip("\r"))
        return len(text)

    def finish(self) -> None:
        if self._rest:
            self._sink(self._rest)


class SshHost:
    """A :class:`Host` over fabric. It connects at the first use and then keeps the connection."""

    def __init__(self, name: str, address: str, login: Login) -> None:
        self._name, self._address, self._login = name, address, login
        self._connection: Connection | None = None

    @property
    def name(self) -> str:
        return self._name

    def _open(self) -> Connection:
        if self._connection is not None and self._connection.is_connected:
            return self._connection
        connection = Connection(
            self._address,
            user=self._login.user,
            port=_PORT,
            # The user's own ~/.ssh/config is for other machines: no ports, proxies or agents of it.
            forward_agent=False,
            config=Config(
                overrides={
                    "runners": {"remote": _InterruptibleRun},
                    "load_ssh_configs": False,
                }
            ),
            connect_timeout=_CONNECT_TIMEOUT_S,
            connect_kwargs={
                "key_filename": str(self._login.key_file),
                "allow_agent": False,
                "look_for_keys": False,
                "banner_timeout": _CONNECT_TIMEOUT_S,
                "auth_timeout": _CONNECT_TIMEOUT_S,
                "channel_timeout": _CONNECT_TIMEOUT_S,
            },
        )
        self._login.known_hosts.touch(mode=0o600)
        connection.client.load_host_keys(str(self._login.known_hosts))
        connection.client.set_missing_host_key_policy(_LearnOnce(self._login.known_hosts))
        try:
            connection.open()
        except paramiko.BadHostKeyException as error:
            raise HostKeyError(
                self._name,
                f"{self._address} shows another host key than at the first contact: "
                f"{error.key.fingerprint}, expected {error.expected_key.fingerprint}",
                hint="somebody may be listening in. If the machine was made anew, remove its line "
                f"from {self._login.known_hosts}",
            ) from None
        except paramiko.AuthenticationException as error:
            raise HostError(self._name, f"SSH does not accept the cluster's key: {error}") from None
        except (OSError, paramiko.SSHException, EOFError) as error:
            raise HostError(
                self._name,
                f"no SSH at {self._address}: {error}",
                hint="SSH is open to the address that this machine had at `up`; has it changed, or "
                "is port 22 blocked?",
            ) from None
        connection.transport.set_keepalive(_KEEPALIVE_S)
        self._connection = connection
        return connection

    def run(
        self,
        command: str,
        *,
        timeout_s: float | None = 120,
        check: bool = True,
        on_line: LineSink | None = None,
    ) -> Result:
        connection = self._open()
        lines = _Lines(on_line) if on_line else None
        options: dict[str, Any] = (
            {"out_stream": lines, "err_stream": lines} if lines else {"hide": True}
        )
        try:
            done = connection.run(command, warn=True, in_stream=False, timeout=timeout_s, **options)
        except CommandTimedOut:
            raise HostError(
                self._name, f"`{_short(command)}`: no end after {timeout_s} s"
            ) from None
        except (OSError, paramiko.SSHException, EOFError) as error:
            self.close()
            raise ConnectionLostError(
                self._name, f"the connection broke: {error or 'closed'}"
            ) from None
        if done.exited == _NO_EXIT_CODE:
            self.close()
            raise ConnectionLostError(self._name, "the connection broke")
        if lines:
            lines.finish()
        if check and done.exited != 0:
            last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
            raise HostError(
                self._name,
                f"`{_short(command)}` ended with {done.exited}: {' | '.join(last) or 'no output'}",
            )
        return Result(done.exited, done.stdout, done.stderr)

    def put(self, content: bytes, path: str, mode: int = 0o600) -> None:
        with self._files(path) as sftp, sftp.open(path, "wb") as file:
            file.chmod(mode)
            file.set_pipelined(True)
            file.write(content)

    def upload(self, source: Path, path: str) -> None:
        with self._files(path) as sftp:
            sftp.put(str(source), path)

    def download(self, path: str, target: Path) -> None:
        with self._files(path) as sftp:
            sftp.get(path, str(target))

    @contextmanager
    def _files(self, path: str) -> Iterator[Any]:
        """The machine's files; a failure names the one in question."""
        try:
            yield self._open().sftp()
        except FileNotFoundError:
            raise HostError(self._name, f"there is no {path}") from None
        except (OSError, paramiko.SSHException, EOFError) as error:
            self.close()
            raise HostError(self._name, f"copying {path}: {error or 'connection closed'}") from None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _short(command: str) -> str:
    """A command's first line, fit for a message."""
    first = command.strip().split("\n", 1)[0]
    return first if len(first) <= 80 else first[:77] + "..."


def sudo(script: str) -> str:
    """A shell script as one command that root runs."""
    return f"sudo bash -c {shlex.quote(script)}"


def on_all(
    what: str, hosts: Iterable[Host], work: Callable[[Host], T], *, hint: str | None = None
) -> dict[str, T]:
    """Do the same on many machines at once; returns the results by machine name.

    Raises :class:`HostsError` with every failed machine's outcome.
    """
    targets: Sequence[Host] = tuple(hosts)
    if not targets:
        return {}
    failures: dict[str, str] = {}
    done: dict[str, T] = {}
    pool = ThreadPoolExecutor(min(FAN_OUT, len(targets)))
    try:
        futures = {host.name: pool.submit(work, host) for host in targets}
        for name, future in futures.items():
            try:
                done[name] = future.result()
            except SprError as error:
                failures[name] = error.message.removeprefix(f"[{name}] ")
    finally:
        # Ctrl-C must not wait for machines that take twenty minutes to answer.
        pool.shutdown(wait=False, cancel_futures=True)
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
    """Wait until a machine answers over SSH and has finished its first boot (cloud-init).

    Raises :class:`HostKeyError` at once for a changed host key, else in the end
    :class:`HostError` with the last reason.
    """
    reason = ""

    def probe() -> bool | None:
        nonlocal reason
        try:
            return host.run("true", timeout_s=_CONNECT_TIMEOUT_S).exit_code == 0
        except HostKeyError:
            raise
        except HostError as error:
            reason = error.message
            return None

    def report(passed: float) -> None:
        if on_wait:
            on_wait(passed, reason)

    try:
        wait_until(
            f"SSH on {host.name}",
            probe,
            deadline_s=deadline_s,
            clock=clock,
            every_s=4,
            on_wait=report,
        )
    except DeadlineError as error:
        raise HostError(
            host.name,
            f"{error.message}: {reason}",
            hint="does its subnet route to an internet gateway, and is --ssh-cidr this machine's "
            "address?",
        ) from None
