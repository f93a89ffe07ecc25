"""This process as a rank: its number from the launcher, requests to stop, and its exit.

Runs on Python 3.8.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .errors import WorkerError, first_line

STOPPED = 128 + signal.SIGTERM
"""143: the exit code of a run that stopped cleanly on request."""
_KERNEL_LOG = ("journalctl", "--quiet", "--dmesg", "--no-pager", "--output=cat")
_LOG_S = 10.0
ABORT_SECONDS = 0.5
"""Time for this rank's last output to pass through mpirun before all ranks end."""
_MPIRUN = ("PMI_RANK", "PMI_SIZE")
"""Hydra (Intel MPI, MPICH) sets both in every process, whether it uses MPI or not."""
_TORCHRUN = ("RANK", "WORLD_SIZE")
_INTERFACES = ("GLOO_SOCKET_IFNAME", "FI_TCP_IFACE", "CCL_KVS_IFACE")
NODES = "SPR_NODES"
"""The environment variable with the job's nodes in rank order, such as ``node0,node2``."""
FOLDER = "SPR_JOB_FOLDER"
"""The environment variable with the job's folder, in all processes of a job on one of our clusters.

The script on the first node sets it. mpirun passes it to the ranks on all nodes [tried: 2021.18].
"""
PLANNED = "SPR_PLANNED_RANKS"
"""The environment variable with the planned number of ranks, for a job that continues with fewer."""


def has_supervisor() -> bool:
    """Return whether this process belongs to a job on one of our clusters, which a supervisor runs."""
    return FOLDER in os.environ


def explain_kill(number: int, pid: int | None, on: Sequence[str] = ()) -> str:
    """Return what the kernel's log says of a killed process; it follows ``killed by signal 9``.

    Without ``pid``, it is not looked for. ``on`` are the words that run a command on its machine, such as
    ``ssh node1``.
    """
    if number != signal.SIGKILL:
        return ""
    log = b""
    if pid:
        with suppress(OSError, subprocess.SubprocessError):
            argv = [*on, *_KERNEL_LOG]
            log = subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LOG_S, check=False
            ).stdout
    if not log.strip():
        return ", perhaps for lack of memory"
    return " by the kernel, for lack of memory" if f"illed process {pid} ".encode() in log else ""


class RankIdentity(NamedTuple):
    """This process among all: ``rank`` (from 0) of ``size``.

    ``planned`` is the number of ranks before nodes were lost; 0 if none was lost.
    """

    rank: int = 0
    size: int = 1
    planned: int = 0


def read_identity(environ: Mapping[str, str]) -> RankIdentity:
    """Return this process's identity from mpirun or torchrun; without either, it is alone.

    Raises :class:`WorkerError`.
    """
    names = next((pair for pair in (_MPIRUN, _TORCHRUN) if {*pair} & environ.keys()), None)
    if names is None:
        return RankIdentity()
    try:
        rank, size = (int(environ[name]) for name in names)
        identity = RankIdentity(rank, size, int(environ.get(PLANNED, 0)))
    except (KeyError, ValueError) as error:
        raise WorkerError(f"{' and '.join(names)} are not both set to numbers: {error}") from error
    if not 0 <= identity.rank < identity.size:
        raise WorkerError(f"{names[0]} {identity.rank} does not fit {names[1]} {identity.size}")
    if identity.size > 1 and not environ.get("MASTER_ADDR"):
        raise WorkerError("MASTER_ADDR is not set: the ranks can't find rank 0")
    return identity


def node_name(environ: Mapping[str, str] = os.environ) -> str:
    """Return the name of this rank's node, such as ``node1``; without :data:`NODES`, its host name."""
    if not environ.get(NODES):
        return socket.gethostname()
    # Not SLURMD_NODENAME: mpirun passes the first node's value to all ranks [tried: 2021.18].
    nodes, identity = environ[NODES].split(","), read_identity(environ)
    return nodes[identity.rank * len(nodes) // identity.size]


VARIABLES = "environment.json"
"""The user's variables for the ranks, on every node until the job has ended."""


def read_words(path: Path) -> list[str]:
    """Return the user's ``NAME=VALUE`` words. Raises :class:`WorkerError` if the file is damaged."""
    try:
        words = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise WorkerError(f"{path} can't be read: {first_line(error)}") from error
    if not isinstance(words, list) or not all(isinstance(w, str) and "=" in w for w in words):
        raise WorkerError(f"{path} is not a list of NAME=VALUE")
    return words


def hide_progress_bars() -> None:
    """Have libraries that are imported later show none: they would garble the output of all ranks."""
    for name in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS"):
        os.environ.setdefault(name, "1")


def choose_interface(environ: MutableMapping[str, str]) -> None:
    """Of the network interfaces of all nodes, keep this machine's."""
    here = {name for _, name in socket.if_nameindex()}
    for variable in {*_INTERFACES} & environ.keys():
        own = ",".join(name for name in environ[variable].split(",") if name in here)
        environ[variable] = own or environ[variable]


class LocalPlace(NamedTuple):
    """This process among those on its machine."""

    rank: int = 0
    size: int = 1


def read_local_place(environ: Mapping[str, str]) -> LocalPlace:
    """Return this process's local rank and the number of ranks on its machine."""
    hydra, torchrun = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    names = torchrun if by_torchrun(environ) else hydra
    try:
        return LocalPlace(int(environ.get(names[0], "0")), int(environ.get(names[1], "1")))
    except ValueError as error:
        raise WorkerError(f"{' and '.join(names)} are not numbers: {error}") from error


def by_torchrun(environ: Mapping[str, str]) -> bool:
    """Return whether torchrun, not mpirun, started this process."""
    return not {*_MPIRUN} & environ.keys() and "LOCAL_RANK" in environ


@dataclass
class StopRequest:
    """Whether a SIGTERM has come. An event's lock could be held when the next one comes."""

    stop: bool = False


@contextmanager
def listen() -> Iterator[StopRequest]:
    """Note a SIGTERM inside a ``with`` block instead of ending the process.

    It requests a stop after a step on which all ranks agree (:mod:`.steps`).
    If one arrived and the block ends normally, the process then ends by it. mpirun (Hydra) forwards
    SIGTERM to every rank on every node and waits for them [tried: 2021.18].
    """
    request = StopRequest()
    before = signal.signal(signal.SIGTERM, lambda *_: setattr(request, "stop", True))
    try:
        yield request
    finally:
        signal.signal(signal.SIGTERM, before)
    if request.stop:
        signal.raise_signal(signal.SIGTERM)


def leave(code: int) -> None:
    """End the process immediately; after a failure, together with all other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)  # the output of libraries such as oneDNN
    if code not in (0, STOPPED):  # after a stop request, every rank ends by itself
        abort_all()
    # During a normal exit, torch's threads may wait for ranks that are gone, or abort the process after
    # a good run ("terminate called without an active exception", seen with torch 2.13 on a busy machine).
    os._exit(code)


def abort_all(environ: Mapping[str, str] = os.environ) -> None:
    """Make mpirun end every rank with exit code 1; without mpirun, do nothing.

    Intel's Hydra (tried: 2021.18) ends the other ranks by itself only for programs that have called
    MPI_Init. These have not: if one were killed, Hydra would wait for the rest. So this sends the line
    of the PMI-1 protocol that MPI_Abort would send, on the descriptor that Hydra opened.
    """
    if environ.get("PMI_FD", "").isdecimal():
        time.sleep(ABORT_SECONDS)
        with suppress(OSError):
            os.write(int(environ["PMI_FD"]), b"cmd=abort exitcode=1\n")
