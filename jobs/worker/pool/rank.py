"""A rank that runs one piece of work after another: its signals, heartbeat, errors, and exit code.

Rank 0 serves a coordinator to all of them. Runs on Python 3.8.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shlex
import signal
import socket
import subprocess
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xmlrpc.client import Error

from ..runtime.errors import WorkerError, first_line
from ..runtime.events import MARK, Events, take_mark
from ..runtime.heartbeat import Heartbeat
from ..runtime.process import NODES, PLANNED, STOPPED, RankIdentity, choose_interface, read_identity
from ..supervisor.commands import run_ssh
from ..supervisor.head import SSH
from .remote import CONNECT_S, Remote, serving
from .stop import PAUSE_S, Stop

_ANSWER_S = 300.0
# Loaded here, because a child process must not wait for a lock that another thread held.
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_OF_MPIRUN = ("PMI_", "HYD", "I_MPI_", "MASTER_", NODES, PLANNED, MARK)


@dataclass
class PoolRank:
    """This process as one of the ranks."""

    what: str
    """What the ranks work on, for messages, such as ``study``."""
    stop: Stop
    identity: RankIdentity = field(default_factory=lambda: read_identity(os.environ))
    events: Events = field(init=False)
    remote: Remote = field(init=False)

    def __post_init__(self) -> None:
        socket.setdefaulttimeout(_ANSWER_S)
        signal.signal(signal.SIGTERM, self.stop.on_signal)
        self.events = Events(self.identity.rank, mark=take_mark())
        choose_interface(os.environ)
        self._heartbeat = Heartbeat(self.identity, self.events)
        self._heartbeat.start()
        address = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ["MASTER_PORT"])
        self.remote = Remote(*address, self.stop)

    def run(self, work: Callable[[], int]) -> int:
        """Run this rank's part; return its exit code: 1 is a failure, 143 a stop by SIGTERM."""
        rank = f"rank {self.identity.rank} of the {self.what}"
        try:
            code = work()
        except WorkerError as error:
            self.events.error(error.message, error.hint)
            code = 1
        except OSError as error:
            code = STOPPED if self.stop.comes() else 1
            if code == 1:
                self._heartbeat.wait_for_verdict()
                self.events.error(f"{rank} fails: {error}", lost_peer=True)
        except Exception as error:
            traceback.print_exc()
            known = error if isinstance(error, Error) else type(error).__name__
            self.events.error(f"{rank} fails: {known}: {first_line(error)}")
            code = 1
        self._heartbeat.stop(goodbye=code != 1)
        return code

    def follow(self, work: Callable[[], object]) -> int:
        """Work as a rank other than 0."""
        self._heartbeat.meet()
        work()
        if not self.stop.requested:
            return 0
        # Hydra kills the others when one ends with this code, and rank 0 has to save what is known.
        self._heartbeat.stay()
        return STOPPED

    def lead(self, coordinator: Any, work: Callable[[], object]) -> bool:
        """Work as rank 0, and serve the coordinator to the others; return whether all work was done."""
        with serving(coordinator, self.remote.address, self.remote.port):
            work()
            until = time.monotonic() + CONNECT_S
            while not self.stop.requested and not self.remote.call("is_over"):
                come, ranks = len(coordinator.hosts), self.identity.size
                if come < ranks and time.monotonic() > until:
                    raise OSError(f"only {come} of {ranks} ranks have come")
                time.sleep(PAUSE_S)
        return not self.stop.requested


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that is no rank: a run with one rank on the same cores."""
    kept = {name: value for name, value in environ.items() if not name.startswith(_OF_MPIRUN)}
    # provision/on_node/proc.py finds ranks by PMI_RANK, and knows by the last one that this is none.
    return {**kept, "PMI_RANK": "0", "PMI_SIZE": "1", "SPR_IN_POOL": "1"}


def die_with_parent() -> None:
    """Have the kernel kill this process with its parent."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent and not parent.is_alive():  # it died before, while this process started
        os._exit(1)


def send_below(folder: Path, names: Sequence[str], to: str, take: str, *options: str) -> None:
    """Send files to a node, where the shell command ``take`` gets an archive. Raises ``OSError``."""
    argv = ["tar", "-C", str(folder), *options, "-cf", "-", *names]
    # Its exit code 1: a file changed meanwhile, such as the log of a process that was left running.
    pack = f"{{ {shlex.join(argv)} || [ $? = 1 ]; }}"
    script = f"set -o pipefail; {pack} | {shlex.join([*SSH, to, take])}"
    if run_ssh(["bash", "-c", script], stdin=subprocess.DEVNULL).returncode:
        raise OSError(f"{folder / names[0]} can't be copied to {to}")


def render_take(place: Path, sender: str) -> str:
    """Return the shell command that unpacks an archive in a folder. A name that is there is complete."""
    new = f".{sender}"
    unpack = f"rm -rf {new}; mkdir {new}; tar -C {new} -xf -; cd {new}"
    move = 'for each in *; do rm -rf "../$each"; mv "$each" ..; done; cd ..; rmdir ' + new
    return f"set -e; mkdir -p {place}; cd {place}; {unpack}; {move}"
