"""The way to a machine without a public address: a command whose input and output lead to its port 22."""

from __future__ import annotations

import socket
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from shutil import which

from infra.errors import UsageError
from infra.spec import EICE, SSM

# https://docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-working-with-install-plugin.html
_SSM_PLUGIN = "session-manager-plugin"
_INSTALL = {
    "ssh": "the OpenSSH client",
    "aws": "the AWS CLI version 2",
    _SSM_PLUGIN: "the Session Manager plugin for the AWS CLI",
}


def proxy_argv(jump: str, instance_id: str, address: str, region: str) -> tuple[str, ...]:
    """Return the command that reaches a machine over ``--jump``; an empty one needs no help.

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
        return (
            "aws",
            "ssm",
            "start-session",
            "--target",
            instance_id,
            *document,
            "--region",
            region,
        )
    host, _, port = jump.partition(":")
    # The user's own configuration, keys, and known hosts apply. A host that is not known is refused.
    options = ("-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-o", "ConnectTimeout=15")
    # Without a port, that of the user's configuration applies.
    chosen = ("-p", port) if port else ()
    return ("ssh", *options, *chosen, "-W", f"{address}:22", "--", host)


def require_jump_tools(jump: str) -> None:
    """Raise :class:`UsageError` if this machine lacks a program that ``--jump`` needs."""
    plugin = (_SSM_PLUGIN,) if jump == SSM else ()
    for program in (*proxy_argv(jump, "", "", "")[:1], *plugin):
        if not which(program):
            raise UsageError(
                f"--jump {jump}: {program} is not installed on this machine",
                hint=f"install {_INSTALL[program]}",
            )


class Proxy:
    """A running proxy command. ``socket`` is its input and output.

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
                # Ctrl-C stops the job over this connection.
                start_new_session=True,
            )
            on_error.pop_all()
        theirs.close()

    def close(self, patience_s: float = 5.0) -> str:
        """End it, and return the last line that it wrote to its error output."""
        self.socket.close()
        self._process.terminate()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with self._errors as file:
            file.seek(0)
            lines = file.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""
