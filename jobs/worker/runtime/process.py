"""This process among the ranks: its number, as mpirun gives it, and its end. Runs on Python 3.8."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from .errors import BackendError
from .stopping import EXIT_CODE

ABORT_SECONDS = 0.5
"""Time for this rank's last output to travel through mpirun before all ranks end."""


PLANNED = "SPR_PLANNED_RANKS"
"""The environment variable with the number of ranks of a job that goes on with fewer."""


class RankIdentity(NamedTuple):
    """This process among all: ``rank`` (from 0) of ``size``.

    ``planned`` is the number of ranks before nodes were lost; 0 if there are as many as planned.
    """

    rank: int = 0
    size: int = 1
    planned: int = 0


def read_identity(environ: Mapping[str, str]) -> RankIdentity:
    """Return the identity that mpirun gave this process; a process started without mpirun is alone.

    Hydra (Intel MPI, MPICH) sets both variables in every process, whether it uses MPI or not.
    Raises :class:`BackendError`.
    """
    if "PMI_RANK" not in environ and "PMI_SIZE" not in environ:
        return RankIdentity()
    try:
        rank, size = int(environ["PMI_RANK"]), int(environ["PMI_SIZE"])
        identity = RankIdentity(rank, size, int(environ.get(PLANNED, 0)))
    except (KeyError, ValueError) as error:
        raise BackendError(f"PMI_RANK and PMI_SIZE are not both set to numbers: {error}") from error
    if not 0 <= identity.rank < identity.size:
        raise BackendError(f"PMI_RANK {identity.rank} does not fit PMI_SIZE {identity.size}")
    if identity.size > 1 and not environ.get("MASTER_ADDR"):
        raise BackendError("MASTER_ADDR is not set: the ranks can't find rank 0")
    return identity


def leave(code: int) -> None:
    """End the process at once; after a failure, together with all other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)  # what libraries printed, such as oneDNN
    if code not in (0, EXIT_CODE):  # after a stop request, every rank ends by itself
        abort_all()
    # During a normal exit, torch's threads may wait for ranks that are gone, or abort the process after
    # a good run ("terminate called without an active exception", seen with torch 2.13 on a busy machine).
    os._exit(code)


def abort_all(environ: Mapping[str, str] = os.environ) -> None:
    """Ask mpirun to end every rank with exit code 1; without mpirun, do nothing.

    Intel's Hydra (tried: 2021.18) ends the other ranks by itself only for programs that have called
    MPI_Init. These have not: if one were killed, Hydra would wait for the rest. So we send what
    MPI_Abort would send, a line of the PMI-1 protocol, on the descriptor that Hydra opened.
    """
    if environ.get("PMI_FD", "").isdecimal():
        time.sleep(ABORT_SECONDS)
        with suppress(OSError):
            os.write(int(environ["PMI_FD"]), b"cmd=abort exitcode=1\n")
