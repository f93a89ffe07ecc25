"""An SSH server of a test's own, on a loopback address, with a real handshake."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import paramiko


@dataclass
class Server(paramiko.ServerInterface):
    """``accepts``: whether the login is good. ``loses``: breaks the connection under a command."""

    key: paramiko.PKey
    port: int = 0
    accepts: bool = True
    stays: bool = False
    """Whether commands run on."""
    says: str = ""
    """What each command prints."""
    exit_code: int = 0
    """That of each command; -1: it says none."""
    loses: bool = False
    refuses: int = 0
    """How many of the next sessions it refuses, as OpenSSH does if ten are open."""
    forwards: int = 0
    """The local port to which it forwards all connections; 0: it refuses, -1: nobody is there."""
    forwarded: list[Any] = field(default_factory=list)
    logins: list[str] = field(default_factory=list)
    transports: list[paramiko.Transport] = field(default_factory=list)

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        self.logins.append(username)
        good = paramiko.common.AUTH_SUCCESSFUL if self.accepts else paramiko.common.AUTH_FAILED
        return int(good)

    def check_channel_request(self, kind: str, chanid: int) -> int:
        if self.refuses:
            self.refuses -= 1
            return int(paramiko.common.OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED)
        return int(paramiko.common.OPEN_SUCCEEDED)

    def check_channel_exec_request(self, channel: Any, command: bytes) -> bool:
        # paramiko says yes to the client only after this has returned.
        threading.Timer(0.05, self._end, (channel,)).start()
        return True

    def check_channel_subsystem_request(self, channel: Any, name: str) -> bool:
        channel.get_transport().close()
        return False

    def check_channel_direct_tcpip_request(self, chanid: int, origin: Any, destination: Any) -> int:
        self.forwarded.append(destination)
        if not self.forwards:
            return int(paramiko.common.OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED)
        if self.forwards < 0:
            return int(paramiko.common.OPEN_FAILED_CONNECT_FAILED)
        # A transport is a thread, and asks from it.
        transport = threading.current_thread()
        threading.Thread(target=self._relay, args=(transport,), daemon=True).start()
        return int(paramiko.common.OPEN_SUCCEEDED)

    def _relay(self, transport: paramiko.Transport) -> None:
        """Pass on what both sides send until one of them ends."""
        # paramiko may wake two threads for one channel.
        while (channel := transport.accept(1)) is None and transport.is_active():
            pass
        with (
            suppress(EOFError, OSError),
            socket.create_connection(("127.0.0.9", self.forwards)) as target,
        ):
            pairs = {channel: target, target: channel}
            while True:
                for side in select.select(list(pairs), [], [], 10)[0]:
                    if not (content := side.recv(65536)):
                        return
                    pairs[side].sendall(content)

    def _end(self, channel: Any) -> None:
        if self.stays:
            return
        if self.loses:
            channel.get_transport().close()
            return
        # A client may have gone before the answer.
        with suppress(EOFError, OSError):
            channel.sendall(self.says.encode())
            if self.exit_code >= 0:
                channel.send_exit_status(self.exit_code)
            channel.close()

    def serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            transport = paramiko.Transport(connection)
            transport.add_server_key(self.key)
            self.transports.append(transport)
            # A client that does not like the key goes away in the middle.
            with suppress(paramiko.SSHException, EOFError, OSError):
                transport.start_server(server=self)


@contextmanager
def serving(server: Server, address: str = "127.0.0.9", port: int = 0) -> Iterator[Server]:
    with socket.create_server((address, port)) as listener:
        server.port = listener.getsockname()[1]
        thread = threading.Thread(target=server.serve, args=(listener,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(60)
            for transport in server.transports:
                transport.close()
