"""``--jump``: a proxy command reaches port 22 of one machine, through which the others are reached."""

from __future__ import annotations

import re
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from shutil import which
from typing import Any

import paramiko

from infra.errors import UsageError
from infra.spec import EICE, SSM
from provision.host import CONNECT_TIMEOUT_S

# https://docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-working-with-install-plugin.html
_SSM_PLUGIN = "session-manager-plugin"
# While no machine answers yet. An EC2 Instance Connect Endpoint has 20 connections for all its users:
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/eice-quotas.html
_MOST_TUNNELS = 8
# The first with `open-tunnel`: https://github.com/aws/aws-cli/blob/v2/.changes/2.12.0.json
_OLDEST_CLI = (2, 12)
_LOGIN_S = 60
# OpenSSH's last words if a jump host let it in; the line before says why: "open failed: connect failed: …".
_NOT_FORWARDED, _WHY_NOT_FORWARDED = "stdio forwarding failed", "open failed: "
_INSTALL = {
    "ssh": "the OpenSSH client",
    "aws": "the AWS CLI version 2.12 or later",
    _SSM_PLUGIN: "the Session Manager plugin for the AWS CLI",
}


def proxy_argv(
    jump: str, instance_id: str, address: str, region: str, port: int = 22
) -> tuple[str, ...]:
    """Return the command that reaches a machine over ``--jump``; empty for a direct connection.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/connect-using-eice.html and
    https://docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-getting-started-enable-ssh-connections.html
    """
    if not jump:
        return ()
    if jump == EICE:
        tunnel = ("open-tunnel", "--instance-id", instance_id, "--remote-port", "22")
        return ("aws", "ec2-instance-connect", *tunnel, "--region", region)
    if jump == SSM:
        document = ("--document-name", "AWS-StartSSHSession", "--parameters", "portNumber=22")
        session = ("start-session", "--target", instance_id, *document)
        return ("aws", "ssm", *session, "--region", region)
    host, _, at = jump.partition(":")
    # The user's own configuration, keys, and known hosts apply. Unknown hosts are refused.
    # With the user's own LogLevel, OpenSSH may not say why it ends.
    options = ("BatchMode=yes", "StrictHostKeyChecking=yes", "ConnectTimeout=15", "LogLevel=INFO")
    chosen = ("-p", at) if at else ()  # else the port of the user's configuration
    words = [word for option in options for word in ("-o", option)]
    return ("ssh", *words, *chosen, "-W", f"{address}:{port}", "--", host)


def require_way(jump: str) -> None:
    """Raise :class:`UsageError` if a program for ``--jump`` is missing or too old, or can't log in."""
    plugin = (_SSM_PLUGIN,) if jump == SSM else ()
    for program in (*proxy_argv(jump, "", "", "")[:1], *plugin):
        if not which(program):
            raise UsageError(
                f"--jump {jump}: {program} is not installed on this machine",
                hint=f"install {_INSTALL[program]}",
            )
    if jump == EICE:
        said = _read_cli_version()
        version = re.search(r"aws-cli/(\d+)\.(\d+)", said)
        if not version or (int(version[1]), int(version[2])) < _OLDEST_CLI:
            raise UsageError(
                f"--jump {jump}: this machine's AWS CLI can't open tunnels: {said}",
                hint=f"install {_INSTALL['aws']}",
            )
    if jump not in ("", EICE, SSM):
        # Some hosts only forward; nothing listens at this port of theirs.
        argv = proxy_argv(jump, "", "127.0.0.1", "", 9)
        if reason := _try_login(argv):
            raise UsageError(f"--jump {jump}: {reason}", hint=login_hint(argv))


def _read_cli_version() -> str:
    """Return what the AWS CLI says about its version, or why it does not run."""
    try:
        done = _run(("aws", "--version"))
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return " ".join((done.stdout + done.stderr).decode(errors="replace").split())


def _try_login(argv: Sequence[str]) -> str:
    """Return why OpenSSH can't log in to a jump host; "" if it can, even if the host refuses to forward."""
    # A host may end with a greeting. A shared connection words a refusal differently.
    own = ("LogLevel=ERROR", "ControlMaster=no", "ControlPath=none")
    try:
        done = _run((argv[0], *(word for each in own for word in ("-o", each)), *argv[1:]))
    except subprocess.TimeoutExpired:
        return f"no login within {_LOGIN_S} s"
    said = done.stderr.decode(errors="replace").strip()
    if not done.returncode or _NOT_FORWARDED in said:
        return ""
    return said.rpartition("\n")[2] or "the login failed"


def _run(argv: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=_LOGIN_S
    )


def jump_hint(argv: Sequence[str], why: str) -> str:
    """Return what helps if a proxy command that is OpenSSH ended, by its last words."""
    if why.startswith(_WHY_NOT_FORWARDED) or why == _NOT_FORWARDED:
        return (
            f"{argv[-1]} lets this machine in but does not reach the node, which may still boot; otherwise, "
            "--ssh-cidr must include its address, and its sshd must allow forwarding"
        )
    return login_hint(argv)


def login_hint(argv: Sequence[str]) -> str:
    """Return what a jump host needs, with the command that logs in to it."""
    port = f"-p {argv[argv.index('-p') + 1]} " if "-p" in argv else ""
    need = "OpenSSH must know the jump host's key and get in without a question"
    return f"{need}: ssh {port}{argv[-1]}"


class Proxy:
    """A running proxy command; ``socket`` is its input and output.

    paramiko's own ProxyCommand waits forever for a command that has ended:
    https://github.com/paramiko/paramiko/issues/495
    """

    def __init__(self, argv: Sequence[str]) -> None:
        with ExitStack() as on_error:
            self._errors = on_error.enter_context(tempfile.TemporaryFile())
            self.socket, theirs = map(on_error.enter_context, socket.socketpair())
            self._process = subprocess.Popen(
                argv,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self._errors,
                start_new_session=True,  # Ctrl-C stops the job over this connection
            )
            on_error.pop_all()
        theirs.close()

    def close(self, patience_s: float = 5.0) -> str:
        """End the command and return the line of its stderr that explains its end: the last one."""
        self.socket.close()
        self._process.terminate()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with self._errors as file:
            file.seek(0)
            lines = file.read().decode(errors="replace").splitlines()
        last = [line.strip() for line in lines if line.strip()][-2:]
        if last[1:] == [_NOT_FORWARDED] and _WHY_NOT_FORWARDED in last[0]:
            return _WHY_NOT_FORWARDED + last[0].partition(_WHY_NOT_FORWARDED)[2]
        return last[-1] if last else ""


class Tunnel:
    """An SSH connection to one machine over a proxy command, used to reach other machines."""

    def __init__(self, name: str, connection: Any, proxy: Proxy) -> None:
        self.name, self._connection, self._proxy = name, connection, proxy

    @property
    def is_open(self) -> bool:
        return bool(self._connection.is_connected)

    def open_channel(self, address: str, port: int) -> paramiko.Channel:
        """Return a connection from the machine to an address."""
        return self._connection.transport.open_channel(
            "direct-tcpip", (address, port), ("127.0.0.1", 0), timeout=CONNECT_TIMEOUT_S
        )

    def answers(self) -> bool:
        """Return whether the machine itself still responds."""
        try:
            self._connection.transport.open_session(timeout=CONNECT_TIMEOUT_S).close()
        except (paramiko.SSHException, EOFError, OSError):
            return False
        return True

    def close(self) -> None:
        self._connection.close()
        self._proxy.close()


class Gateway:
    """The first machine of a cluster that answers over ``--jump``; the others are reached through it.

    All connections share one tunnel: endpoints allow few, for an hour at most.
    """

    def __init__(self) -> None:
        self._tunnel: Tunnel | None = None
        self._lock = threading.Lock()
        self._seats = threading.Semaphore(_MOST_TUNNELS)

    @property
    def name(self) -> str:
        """The machine's name; "" if there is currently none."""
        tunnel = self._tunnel
        return tunnel.name if tunnel and tunnel.is_open else ""

    def connect(self, address: str, port: int, dig: Callable[[], Tunnel]) -> Any:
        """Return a socket-like connection to a machine's private address.

        If there is no gateway yet, ``dig`` opens a tunnel to this machine, which becomes the gateway.
        """
        if channel := self._connect(address, port):
            return channel
        with self._seats:
            if channel := self._connect(address, port):
                return channel
            fresh = dig()
            with self._lock:
                spare, self._tunnel = (fresh, self._tunnel) if self.name else (self._tunnel, fresh)
            if spare:
                spare.close()
        if channel := self._connect(address, port):
            return channel
        raise OSError("the connection broke")

    def _connect(self, address: str, port: int) -> paramiko.Channel | None:
        """Return a connection over the gateway; ``None`` without one. Raises if the target is silent."""
        tunnel = self._tunnel
        if not tunnel:
            return None
        if not tunnel.is_open:
            self._drop(tunnel)
            return None
        try:
            return tunnel.open_channel(address, port)
        except paramiko.ChannelException as error:
            if error.code != paramiko.common.OPEN_FAILED_CONNECT_FAILED:
                self._drop(tunnel)
            raise
        except (paramiko.SSHException, EOFError, OSError):
            if tunnel.answers():
                raise
            self._drop(tunnel)
            return None

    def _drop(self, tunnel: Tunnel) -> None:
        with self._lock:
            if self._tunnel is tunnel:
                self._tunnel = None
        tunnel.close()

    def close(self) -> None:
        if tunnel := self._tunnel:
            self._drop(tunnel)
