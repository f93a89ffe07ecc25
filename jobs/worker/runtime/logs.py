"""Each rank's own log, in addition to the merged log of all ranks."""

from __future__ import annotations

import os
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
        # A signal to the job's processes must not end it before them: it has its own session, but Slurm
        # finds it all the same.
        copier = subprocess.Popen(
            ["sh", "-c", "trap '' TERM; exec tee -a \"$0\"", str(path)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        assert copier.stdin is not None
        for descriptor in (1, 2):
            os.dup2(copier.stdin.fileno(), descriptor)
        copier.stdin.close()
        # It ends last, so it is not waited for. (Popen would warn of that.)
        copier.returncode = 0
