"""The proof of the launcher: one rank on every node that imports torch and says what it has."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from provision.host import Host
from provision.install import VENV
from provision.mpi import HOSTFILE, MPIRUN_ENV, explain_mpi_failure

_DEADLINE_S = 120
_TIMEOUT = 124
_SAID = re.compile(r"^hello (\d+) (torch|error) (.*)$", re.MULTILINE)
# A rank that fails would have mpirun end the others before they speak: so it tells, and ends well.
_TRY = (
    r"try:\n import torch; told = 'torch ' + torch.__version__"
    r"\nexcept Exception as e: told = 'error ' + ' '.join(str(e).split())"
)
# In one line, as mpirun hands it on.
_PROGRAM = f'import os; exec("{_TRY}"); print("hello", os.environ["PMI_RANK"], told)'


@dataclass(frozen=True)
class Hello:
    """torch's version by node, of those that have it; the other nodes' ``errors``.

    ``error`` is why mpirun as a whole did not do it.
    """

    torch: dict[str, str]
    errors: dict[str, str] = field(default_factory=dict)
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
    # One rank a node, in the hostfile's order.
    said = {nodes[int(rank)]: (kind, text) for rank, kind, text in _SAID.findall(done.stdout)}
    torch = {node: text for node, (kind, text) in said.items() if kind == "torch"}
    errors = {node: text for node, (kind, text) in said.items() if kind == "error"}
    if done.exit_code == 0 and len(said) == len(nodes):
        return Hello(torch, errors)
    if done.exit_code == _TIMEOUT:
        return Hello(torch, errors, f"mpirun did not end within {_DEADLINE_S} s")
    lines = f"{done.stdout}\n{done.stderr}".splitlines()
    last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
    spoke = f"{len(said)} of {len(nodes)} nodes spoke"
    why = explain_mpi_failure(lines) or f"exit code {done.exit_code}: {last}"
    return Hello(torch, errors, spoke if done.exit_code == 0 else f"{spoke}: {why}")
