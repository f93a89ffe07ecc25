"""SSH to a machine through fabric, with host keys pinned at first contact."""

from __future__ import annotations

import codecs
import logging
import shlex
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import paramiko
from fabric import Config, Connection
from fabric.runners import Remote
from invoke.exceptions import CommandTimedOut

from infra.ec2.key_pair import fingerprint
from infra.errors import ConnectionLostError, HostError, HostKeyError, JumpError, NoAnswerError
from provision.host import CONNECT_TIMEOUT_S, Login, Result, TextSink
from provision.host_keys import pin_host_keys, pinned_host_keys
from provision.jump import Gateway, Proxy, Tunnel, jump_hint

_KEEPALIVE_S = 20
# Seconds without an answer after which a connection or a transfer is given up.
_LOST_S = 60
_SESSION_AGAIN_S = 0.1
_PORT = 22
# paramiko's exit code if the connection ended before the command did.
_NO_EXIT_CODE = -1
LINE_BYTES = 1 << 16
"""Longer lines of streamed output are split."""
_LONGEST_ANSWER_BYTES = 1 << 22
# Number of lines at the end of an output that may explain a failure.
_SEARCHED = 20
# paramiko logs tracebacks for connections that a booting machine refuses; our errors name the reason.
logging.getLogger("paramiko").setLevel(logging.CRITICAL)


class _LearnOnce(paramiko.MissingHostKeyPolicy):
    """Pins a host's key at first contact; paramiko rejects a changed key."""

    def __init__(self, host: SshHost) -> None:
        self._host = host

    def missing_host_key(self, client: Any, hostname: str, key: paramiko.PKey) -> None:
        shown, file, alias = _text_of(key), self._host.login.known_hosts, self._host.alias
        pinned = pinned_host_keys(file, alias)
        if pinned and shown not in pinned:  # of another type, or paramiko could not parse those
            raise self._host.refuse_key(shown, pinned)
        pin_host_keys(file, alias, [*pinned, shown])
        client.get_host_keys().add(hostname, key.get_name(), key)


class _Run(Remote):
    """fabric's runner, except that it reads UTF-8, and that Ctrl-C ends it, not the command's end."""

    def read_proc_output(self, reader: Callable[[int], bytes]) -> Iterator[str]:
        # fabric would decode each piece by itself, although a character may be in two.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while block := reader(LINE_BYTES):
            yield decoder.decode(block)
        yield decoder.decode(b"", final=True)

    def send_interrupt(self, interrupt: KeyboardInterrupt) -> None:
        # Otherwise fabric's readers wait until the remote command's output ends.
        self.channel.close()
        raise interrupt


class _Connection(Connection):
    """fabric's connection, except that a refused session is tried again."""

    def create_session(self) -> paramiko.Channel:
        return _open_session(self.transport)


def whole_lines(blocks: Iterable[bytes], longest: int = LINE_BYTES) -> Iterator[str]:
    """Yield texts of whole lines, as a terminal shows them; longer ones in pieces of ``longest`` bytes.

    A line that rewrites itself after ``\\r``, such as a progress bar, is yielded in its last state. No block
    may be longer than ``longest``.
    """
    rest = b""
    for block in blocks:
        rest += block
        # Of the lines, only the first one can have begun before this block.
        while len(rest) > longest and b"\n" not in rest[: longest + 1]:
            yield _last_states(rest[:longest])
            rest = rest[longest:]
        whole, end, rest = rest.rpartition(b"\n")
        if whole or end:
            yield _last_states(whole)
    if rest:
        yield _last_states(rest)


def _last_states(lines: bytes) -> str:
    text = lines.decode(errors="replace")
    if "\r" not in text:
        return text
    states = (reversed(line.split("\r")) for line in text.split("\n"))
    return "\n".join(next((each for each in line if each.strip()), "") for line in states)


class ChannelStream:
    """A :class:`provision.host.Stream` over one channel of an SSH connection."""

    def __init__(self, name: str, channel: paramiko.Channel) -> None:
        self._name, self._channel = name, channel

    def send(self, text: str) -> None:
        try:
            self._channel.sendall(text.encode())
        except (OSError, paramiko.SSHException) as error:
            raise ConnectionLostError(self._name, f"the connection broke: {error}") from None

    def __iter__(self) -> Iterator[str]:
        for text in whole_lines(_receive(self._channel, None), _LONGEST_ANSWER_BYTES):
            yield from text.split("\n")

    def close(self) -> None:
        self._channel.close()


def _receive(channel: paramiko.Channel, deadline: float | None) -> Iterator[bytes]:
    """Yield what a command prints. Raises :class:`TimeoutError` at the deadline."""
    while True:
        if deadline is not None:
            channel.settimeout(max(0.0, deadline - time.monotonic()))
        if not (block := channel.recv(LINE_BYTES)):
            return
        yield block


def _wait_for_exit(channel: paramiko.Channel, deadline: float | None) -> int:
    """Return the exit code. Raises :class:`TimeoutError` at the deadline."""
    left = None if deadline is None else max(0.0, deadline - time.monotonic())
    if not channel.status_event.wait(left):
        raise TimeoutError
    return int(channel.recv_exit_status())


class SshHost:
    """A :class:`Host` over fabric. It connects at the first use and keeps the connection for all threads.

    ``alias`` names its host keys in the known-hosts file: the instance id, because an address may be
    reassigned. ``proxy`` is a command that connects to its port 22. With a ``gateway``, all machines share
    one such command. ``why_gone`` implements the method.
    """

    def __init__(
        self,
        name: str,
        address: str,
        login: Login,
        *,
        alias: str,
        region: str = "",
        proxy: Sequence[str] = (),
        gateway: Gateway | None = None,
        why_gone: Callable[[], str] = str,
    ) -> None:
        self.name, self._address, self.login, self.alias = name, address, login, alias
        self.why_gone, self._proxy_argv, self._region = why_gone, proxy, region
        self._gateway = gateway if proxy else None
        self._connection: Connection | None = None
        self._sftp: paramiko.SFTPClient | None = None
        self._proxy: Proxy | None = None
        self._opening, self._opening_files = threading.Lock(), threading.Lock()

    def _open(self) -> Connection:
        with self._opening:
            connection = self._connection  # another thread may close it
            if connection is None or not connection.is_connected:
                self.close()
                connection = self._connection = self._connect()
            return connection

    def _connect(self) -> Connection:
        sock = None
        try:
            if self._gateway:
                sock = self._gateway.connect(self._address, _PORT, self._dig)
            elif self._proxy_argv:
                self._proxy = Proxy(self._proxy_argv)
                sock = self._proxy.socket
            return self._log_in(sock)
        except paramiko.BadHostKeyException as error:
            raise self.refuse_key(_text_of(error.key), [_text_of(error.expected_key)]) from None
        except paramiko.AuthenticationException as error:
            raise HostError(
                self.name,
                f"SSH rejects the cluster's key: {error}",
                hint="cloud-init writes it early in the first boot; later, a rejection means that "
                "~/.ssh/authorized_keys on the node was changed",
            ) from None
        except (OSError, paramiko.SSHException, EOFError) as error:
            if self._proxy_argv:
                raise self._explain_proxy(error) from None
            raise NoAnswerError(
                self.name,
                f"no SSH at {self._address}: {error}",
                hint="SSH is open to the address that this machine had at `up`. Has it changed, or "
                "is port 22 blocked?",
            ) from None

    def _watch(self, transport: paramiko.Transport) -> None:
        """End a connection when the machine stops answering.

        TCP alone would try for 15 minutes, and a proxy command may never notice.
        """
        # A proxy command buffers uploads, OpenSSH's 2 MB, and the request waits behind them.
        limit_s = 2 * _LOST_S if self._proxy_argv else _LOST_S

        def ask() -> None:
            while transport.is_active():
                end = threading.Timer(limit_s, transport.close)
                end.daemon = True
                end.start()
                with suppress(OSError, paramiko.SSHException, EOFError):
                    transport.global_request("keepalive@openssh.com")  # waits for the answer
                end.cancel()
                time.sleep(_KEEPALIVE_S)

        threading.Thread(target=ask, daemon=True).start()

    def _dig(self) -> Tunnel:
        """Open this machine's tunnel for a gateway; on failure, report the proxy's reason."""
        self._proxy = proxy = Proxy(self._proxy_argv)
        connection = self._log_in(proxy.socket)
        self._proxy = None
        return Tunnel(self.name, connection, proxy)

    def _log_in(self, sock: Any) -> Connection:
        """Connect, over ``sock`` if there is one, and watch the connection."""
        connection = _Connection(
            self._address,
            user=self.login.user,
            port=_PORT,
            # The user's ~/.ssh/config and ~/.fabric.yaml are for other machines: their ports, proxies, and
            # agents do not apply.
            forward_agent=False,
            config=Config(overrides={"runners": {"remote": _Run}}, lazy=True),
            connect_timeout=CONNECT_TIMEOUT_S,
            connect_kwargs={
                "key_filename": str(self.login.key_file),
                # An agent may have so many keys that the server refuses before it sees ours.
                "allow_agent": False,
                "look_for_keys": False,
                "banner_timeout": CONNECT_TIMEOUT_S,
                "auth_timeout": CONNECT_TIMEOUT_S,
                "channel_timeout": CONNECT_TIMEOUT_S,
                "sock": sock,
            },
        )
        for key in pinned_host_keys(self.login.known_hosts, self.alias):
            _trust(connection.client.get_host_keys(), self._address, key)
        connection.client.set_missing_host_key_policy(_LearnOnce(self))
        connection.open()
        self._watch(connection.transport)
        return connection

    def _explain_proxy(self, error: Exception) -> NoAnswerError:
        over = self._gateway.name if self._gateway and not self._proxy else ""
        if over:
            return NoAnswerError(
                self.name,
                f"no SSH at {self._address} from {over}: {error}",
                hint=f"{over} answers, so the fault is this machine's, or of the rules between them",
            )
        why = self._proxy.close() if self._proxy else ""
        self._proxy = None
        is_host = self._proxy_argv[0] == "ssh"
        hint = "does this command work by itself?"
        if is_host:
            hint = jump_hint(self._proxy_argv, why)
        command = shlex.join(self._proxy_argv)
        return JumpError(
            self.name, f"no SSH at {self._address} over `{command}`: {why or error}", hint=hint
        )

    def refuse_key(self, shown: str, pinned: Sequence[str]) -> HostKeyError:
        """Return the error for a host key that is none of the pinned ones."""
        received, *others = (f"{key.split()[0]} {fingerprint(key)}" for key in (shown, *pinned))
        expected = ", ".join(others)
        file = self.login.known_hosts
        region = f" --region {self._region}" if self._region else ""
        return HostKeyError(
            self.name,
            f"{self._address} shows another SSH host key than {self.alias} had: received {received}, "
            f"expected {expected}. Not connected",
            hint="The connection may be intercepted. It is harmless if the node stopped a moment ago "
            "and its address went to another machine: run the command again. If its keys in /etc/ssh "
            "were regenerated on purpose, compare with the node's console (`aws ec2 "
            f"get-console-output{region} --instance-id {self.alias}`) and remove the old one: "
            f"ssh-keygen -R {self.alias} -f '{file}'",
        )

    def run(
        self,
        command: str,
        *,
        timeout_s: float | None = 120,
        check: bool = True,
        on_text: TextSink | None = None,
    ) -> Result:
        try:
            run = partial(self._follow, on_text) if on_text else self._run
            done = run(command, timeout_s)
        except (CommandTimedOut, TimeoutError):
            raise HostError(
                self.name, f"`{_short(command)}` did not finish within {timeout_s} s"
            ) from None
        if done.exit_code == _NO_EXIT_CODE:
            raise self._lose()
        if check:
            _require_success(self.name, command, done)
        return done

    def _run(self, command: str, timeout_s: float | None) -> Result:
        connection = self._open()
        try:
            done = connection.run(
                _in_bash(command), hide=True, warn=True, in_stream=False, timeout=timeout_s
            )
        except (OSError, paramiko.SSHException, EOFError) as error:
            raise self._lose(error) from None
        return Result(done.exited, done.stdout, done.stderr)

    def _follow(self, on_text: TextSink, command: str, timeout_s: float | None) -> Result:
        """Run a command whose output may be long: only its last lines are kept."""
        last: deque[str] = deque(maxlen=3)
        with closing(self._open_channel(command, combine_stderr=True)) as channel:
            deadline = None if timeout_s is None else time.monotonic() + timeout_s
            for text in whole_lines(_receive(channel, deadline)):
                on_text(text)
                ends = text.rsplit("\n", _SEARCHED)[-_SEARCHED:]
                last.extend(line for line in ends if line.strip())
            return Result(_wait_for_exit(channel, deadline), "\n".join(last), "")

    def _lose(self, error: Exception | None = None) -> ConnectionLostError:
        if not isinstance(error, paramiko.ChannelException):  # refused: other commands run on
            self.close()
        why = f": {error or 'closed'}" if error is not None else ""
        return ConnectionLostError(self.name, f"the connection broke{why}")

    def open_stream(self, command: str) -> ChannelStream:
        return ChannelStream(self.name, self._open_channel(command, combine_stderr=True))

    def _open_channel(self, command: str, *, combine_stderr: bool = False) -> paramiko.Channel:
        # Not fabric's run, which keeps all output and rejoins it for every piece that arrives.
        connection = self._open()
        try:
            channel = connection.create_session()
            channel.set_combine_stderr(combine_stderr)
            channel.exec_command(_in_bash(command))
        except (OSError, paramiko.SSHException, EOFError) as error:
            raise self._lose(error) from None
        return channel

    def put(self, content: bytes, path: str, mode: int = 0o600) -> None:
        with self._files(path) as sftp, sftp.open(path, "wb") as file:
            file.chmod(mode)
            file.set_pipelined(True)
            file.write(content)

    def upload(self, source: Path, path: str) -> None:
        with self._files(path) as sftp:
            sftp.put(str(source), path)

    def download(self, command: str) -> Iterator[bytes]:
        channel = self._open_channel(command)
        channel.settimeout(_LOST_S)
        return self._read_all(channel, command)

    def _read_all(self, channel: paramiko.Channel, command: str) -> Iterator[bytes]:
        said = b""
        with channel:
            try:
                while chunk := channel.recv(1 << 18):
                    yield chunk
                    while channel.recv_stderr_ready():  # unread, it would fill the channel's window
                        said = (said + channel.recv_stderr(1 << 16))[-(1 << 12) :]
                while chunk := channel.recv_stderr(1 << 16):
                    said = (said + chunk)[-(1 << 12) :]
                code = channel.recv_exit_status()
            except TimeoutError:
                why = f"`{_short(command)}` sent nothing for {_LOST_S} s"
                raise HostError(self.name, why) from None
        if code == _NO_EXIT_CODE:
            raise self._lose()
        _require_success(self.name, command, Result(code, "", said.decode(errors="replace")))

    def _open_files(self) -> paramiko.SFTPClient:
        """Return the SFTP session that all threads share. fabric's has no time limit."""
        with self._opening_files:  # not the other lock: commands need no files
            connection = self._open()
            if self._sftp is None:
                channel = connection.create_session()
                channel.settimeout(_LOST_S)
                channel.invoke_subsystem("sftp")
                self._sftp = paramiko.SFTPClient(channel)
            return self._sftp

    @contextmanager
    def _files(self, path: str) -> Iterator[Any]:
        """The machine's files; a failure names ``path``."""
        try:
            yield self._open_files()
        except FileNotFoundError:
            raise HostError(self.name, f"there is no {path}") from None
        except (OSError, paramiko.SSHException, EOFError) as error:
            # An error such as a full disk leaves the connection intact.
            silent = isinstance(error, TimeoutError)
            connected = self._connection is not None and self._connection.is_connected
            lost = silent or not isinstance(error, OSError) or not connected
            self.close()
            kind = ConnectionLostError if lost else HostError
            why = f"no answer for {_LOST_S} s" if silent else str(error) or "connection closed"
            raise kind(self.name, f"copying {path}: {why}") from None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = self._sftp = None
        if self._proxy is not None:
            self._proxy.close()
            self._proxy = None


def _text_of(key: paramiko.PKey) -> str:
    return f"{key.get_name()} {key.get_base64()}"


def _open_session(transport: paramiko.Transport) -> paramiko.Channel:
    """Open a session. sshd refuses an eleventh, and those that have just ended may still count."""
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        try:
            return transport.open_session(timeout=CONNECT_TIMEOUT_S)
        except paramiko.SSHException:  # its ChannelException may go to another thread
            if not transport.is_active() or time.monotonic() > deadline:
                raise
            time.sleep(_SESSION_AGAIN_S)


def _trust(known: paramiko.HostKeys, address: str, key: str) -> None:
    """Make paramiko expect a key at an address, under its own notation for the address."""
    name = address if _PORT == paramiko.config.SSH_PORT else f"[{address}]:{_PORT}"
    with suppress(paramiko.hostkeys.InvalidHostKey, paramiko.SSHException):
        entry = paramiko.hostkeys.HostKeyEntry.from_line(f"{name} {key}")
        if entry is not None:  # ``None``: a key type that paramiko does not support
            known.add(name, entry.key.get_name(), entry.key)


def _require_success(name: str, command: str, done: Result) -> None:
    if done.exit_code != 0:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
        what = f"`{_short(command)}` ended with {done.exit_code}"
        raise HostError(name, f"{what}: {' | '.join(last) or 'no output'}")


def _in_bash(command: str) -> str:
    """Return a command for any login shell."""
    return f"exec bash -c {shlex.quote(command)}"


def _short(command: str) -> str:
    """A command's first line, shortened for messages."""
    first = command.strip().split("\n", 1)[0]
    return first if len(first) <= 80 else first[:77] + "..."
