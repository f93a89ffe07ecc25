"""Each rank's own log, in addition to the merged log of all ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

FOLDER = "logs"


def keep_log(output: Path, rank: int, *, append: bool) -> None:
    """Copy everything that this process prints from now on to ``logs/rank-N.log``.

    A separate process copies it and outlives this one, so that a crash's last lines are kept. If the
    folder can't be written, there is no log; :func:`.output.prepare_output` reports the error.
    """
    path = output / FOLDER / f"rank-{rank}.log"
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not append:
            path.write_bytes(b"")
        sys.stdout.flush()
        sys.stderr.flush()
        copier = _start_copier(path)
        assert copier.stdin is not None
        for descriptor in (1, 2):
            os.dup2(copier.stdin.fileno(), descriptor)
        copier.stdin.close()
        # It ends last, so it is not waited for. (Popen would warn of that.)
        copier.returncode = 0


def _start_copier(path: Path) -> subprocess.Popen[bytes]:
    """Start a process that a signal to the job's processes does not end before them.

    It has its own session, but Slurm finds it all the same. It inherits a blocked signal from its first
    moment on; this process gets one that arrives meanwhile afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        return subprocess.Popen(
            ["tee", "-a", str(path)], stdin=subprocess.PIPE, start_new_session=True
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
