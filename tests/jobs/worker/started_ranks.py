"""Ranks as real processes on this machine, as mpirun starts them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]


def find_two_ports() -> int:
    """The second of two neighboring free ports: the first is the heartbeat's."""
    for _ in range(100):
        with socket.socket() as first, socket.socket() as second, suppress(OSError):
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1] + 1
            second.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no two free ports")


@contextmanager
def started_ranks(
    folders: Sequence[Path], argv: Sequence[str], own: Sequence[Mapping[str, str]] = ({}, {})
) -> Iterator[list[subprocess.Popen[str]]]:
    """A rank of ``python -m argv`` in each of these job folders, with its own variables."""
    shared = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY / "jobs"),
        "PMI_SIZE": str(len(folders)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(find_two_ports()),
        "OMP_NUM_THREADS": "1",
    }
    running = [
        subprocess.Popen(
            [sys.executable, "-m", *argv],
            cwd=folder,
            env={**shared, "PMI_RANK": str(rank), **own[rank]},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, folder in enumerate(folders)
    ]
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.communicate()
