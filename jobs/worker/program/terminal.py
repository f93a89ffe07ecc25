"""A program on the user's terminal: the rank waits while the program runs in the user's SSH session.

The rank writes what the program needs to a private file. The client then starts
``python -m worker.program.terminal`` on the rank's node with OpenSSH, in the job's folder. That process holds
a lock while the program runs, so the rank also notices if it is killed or if the connection drops.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ..runtime.cores import LIMITS
from ..runtime.errors import WorkerError

_OFFER, _SESSION, _EXIT = Path("terminal.json"), Path("terminal.pid"), Path("terminal.exit")
CONNECT_S = 60.0
"""Time for the client to connect."""
_POLL_S, _STOP_S = 0.1, 5
_HANG_UP = (signal.SIGHUP, signal.SIGTERM)
# A program with MPI would wait for this rank's mpirun.
_LAUNCHERS = ("PMI", "HYDRA", "MPI_", "I_MPI_")


def wait_for_session(
    program: Sequence[str], folder: str, environ: Mapping[str, str], stops: Sequence[int]
) -> int:
    """Offer a program to the client; return its exit code when its session has ended.

    A signal in ``stops`` ends the session. Raises :class:`WorkerError` if there is none within
    :data:`CONNECT_S` seconds, or if it was killed.
    """
    kept = {name: text for name, text in environ.items() if not name.startswith(_LAUNCHERS)}
    cpus = sorted(os.sched_getaffinity(0))
    _OFFER.touch(0o600)
    _OFFER.write_text(json.dumps([[*program], folder, kept, cpus]), encoding="utf-8")
    _SESSION.touch(0o600)
    try:
        return _wait(stops)
    finally:
        with suppress(FileNotFoundError):
            _OFFER.unlink()  # it contains the user's variables


def _wait(stops: Sequence[int]) -> int:
    began, code = time.monotonic(), None
    while code is None:
        time.sleep(_POLL_S)
        pid = _SESSION.read_text(encoding="utf-8")
        if pid and not _is_held():
            if not _EXIT.exists():
                raise WorkerError("the session of this program was killed")
            code = int(_EXIT.read_text(encoding="utf-8"))
        elif stops:
            if pid:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGTERM)
            code = 128 + stops[0]
        elif not pid and time.monotonic() - began > CONNECT_S:
            raise WorkerError(f"no terminal connected within {CONNECT_S:g} s")
    return code


def _is_held() -> bool:
    with _SESSION.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def main() -> int:
    """Run the offered program on this terminal. Returns its exit code."""
    with _SESSION.open("a+", encoding="utf-8") as session:
        fcntl.flock(session, fcntl.LOCK_EX)
        if session.tell() or not _OFFER.exists():
            print("this job has no program for a terminal, or it has run already", file=sys.stderr)
            return 1
        program, folder, environ, cpus = json.loads(_OFFER.read_text(encoding="utf-8"))
        _OFFER.unlink()
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANG_UP)  # before the rank can know this process
        session.write(str(os.getpid()))
        session.flush()
        if environ.get("SPR_CORES"):  # the limits of its job, which this session is not part of
            hold = [*LIMITS, "hold", environ["SLURM_JOB_ID"], str(os.getpid())]
            subprocess.run(hold, env=environ, check=False)
        os.sched_setaffinity(0, cpus)
        environ["TERM"] = os.environ.get("TERM", "dumb")
        code = _run(program, folder, environ)
        _EXIT.write_text(str(code), encoding="utf-8")
    return code


def _run(program: Sequence[str], folder: str, environ: Mapping[str, str]) -> int:
    """Run the program; pass SIGHUP and SIGTERM on, also those that came before its start."""

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANG_UP)

    def hang_up(*_: object) -> None:
        # Interactive shells ignore SIGTERM.
        child.send_signal(signal.SIGHUP)
        signal.alarm(_STOP_S)

    # Ctrl-C is the program's; there is no shell to continue it after Ctrl-Z.
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        child = subprocess.Popen(program, cwd=folder, env=environ, preexec_fn=unblock)
    except OSError as error:
        print(f"{program[0]} can't be run: {error.strerror}", file=sys.stderr)
        return 127
    signal.signal(signal.SIGALRM, lambda *_: child.kill())
    for number in _HANG_UP:
        signal.signal(number, hang_up)
    unblock()
    code = child.wait()
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main())
