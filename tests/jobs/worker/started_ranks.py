"""Ranks as real processes on this machine, as mpirun starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.jobs.worker.training.test_run import free_port

REPOSITORY = Path(__file__).parents[3]


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
        "MASTER_PORT": str(free_port()),
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
