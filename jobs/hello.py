"""The proof of the launcher: one rank on every node that imports torch and says where it is."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from jobs.launch import explain_failure
from jobs.mpirun import HOSTFILE, MPIRUN_ENV
from provision.host import Host
from provision.install import VENV

_DEADLINE_S = 120
_TIMEOUT = 124
_SAID = re.compile(r"^hello (\S+) (\S+)$", re.MULTILINE)
_PROGRAM = "import socket, torch; print('hello', socket.gethostname(), torch.__version__)"


@dataclass(frozen=True)
class Hello:
    """torch's version by hostname, of the ranks that spoke; ``error`` is why not all of them did."""

    said: dict[str, str]
    error: str | None = None


def hello_command(nodes: int) -> str:
    """mpirun as a job starts it, with a deadline: where a port is closed it would wait for ever."""
    exports = "; ".join(f"export {name}={shlex.quote(value)}" for name, value in MPIRUN_ENV.items())
    argv = [f"{VENV}/bin/mpirun", "-f", HOSTFILE, "-n", str(nodes), "-ppn", "1"]
    argv += ["-bootstrap", "ssh", f"{VENV}/bin/python", "-c", _PROGRAM]
    return f"{exports}; timeout -k 5 {_DEADLINE_S} {shlex.join(argv)} < /dev/null"


def say_hello(head: Host, nodes: Sequence[str]) -> Hello:
    """Start a rank on every node of the hostfile, and listen to them."""
    done = head.run(hello_command(len(nodes)), timeout_s=_DEADLINE_S + 30, check=False)
    said = dict(_SAID.findall(done.stdout))
    if done.exit_code == 0 and len(said) == len(nodes):
        return Hello(said)
    if done.exit_code == _TIMEOUT:
        return Hello(said, f"mpirun did not end within {_DEADLINE_S} s")
    lines = f"{done.stdout}\n{done.stderr}".splitlines()
    last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
    spoke = f"{len(said)} of {len(nodes)} nodes spoke"
    why = explain_failure(lines) or f"exit code {done.exit_code}: {last}"
    return Hello(said, spoke if done.exit_code == 0 else f"{spoke}: {why}")
