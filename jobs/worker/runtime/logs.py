"""Each rank's own log, beside the merged one in which the lines of all ranks stand together."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

FOLDER = "logs"


def keep_log(output: Path, rank: int, *, append: bool) -> None:
    """Copy all that this process prints from now on, libraries included, to ``logs/rank-N.log``.

    By a process of its own, which outlives this one: so a crash's last words are there, too. Where
    the folder can't be written the run itself will say so, or do without.
    """
    path = output / FOLDER / f"rank-{rank}.log"
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not append:
            path.write_bytes(b"")
        sys.stdout.flush()
        sys.stderr.flush()
        # Of a session of its own: a signal to the job's processes is not for it, it ends with them.
        copier = subprocess.Popen(
            ["tee", "-a", str(path)], stdin=subprocess.PIPE, start_new_session=True
        )
        assert copier.stdin is not None
        for descriptor in (1, 2):
            os.dup2(copier.stdin.fileno(), descriptor)
        copier.stdin.close()
        # Not waited for: it must be the last one to end. (Popen would warn of that.)
        copier.returncode = 0
