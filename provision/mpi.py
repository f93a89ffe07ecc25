"""Intel MPI from PyPI's ``impi-rt``: its environment, and the causes of its failures. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from provision.install import VENV

HOSTFILE = "/home/ubuntu/hosts"
"""The nodes' names in the order of their ranks, head first; the same file on every node."""
MPIRUN_ENV = {
    "PATH": f"{VENV}/bin:/usr/local/bin:/usr/bin:/bin",
    "I_MPI_ROOT": VENV,
    "LD_LIBRARY_PATH": f"{VENV}/lib",
    "FI_PROVIDER_PATH": f"{VENV}/lib",
}
"""Where mpirun finds its programs, its libraries, and libfabric's providers."""


def explain_mpi_failure(lines: Sequence[str]) -> str | None:
    """Return the cause that mpirun's output names, as one line; ``None`` if it names none.

    Intel MPI's Hydra reports a node on which it can't start a process as
    ``Unable to run bstrap_proxy on HOST``.
    """
    rank = "a rank"
    for line in lines:
        if match := re.match(r"= +RANK (\d+) PID \d+ RUNNING AT (\S+)", line):
            rank = f"rank {match[1]} on {match[2]}"
        if match := re.search(r"[Uu]nable to run bstrap_proxy on (\S+)", line):
            return (
                f"mpirun can't start on {match[1].rstrip('.,')}: does the head reach it over SSH?"
            )
        if match := re.search(r"@(\S+?)\] HYD_spawn .* unable to bind process", line):
            return f"mpirun can't pin a rank on {match[1]}: have its usable CPUs changed?"
        if "cannot open shared object file" in line or "mpirun: not found" in line:
            return line.strip()
        if match := re.search(r"KILLED BY SIGNAL: (\d+) \(([^)]*)\)", line):
            return f"{rank} was killed by signal {match[1]} ({match[2]})"
    return None
