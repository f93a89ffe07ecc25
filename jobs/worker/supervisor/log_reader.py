"""Print a job's log, starting at a given line, until the job ends. Sent to a node and run there by the
system's Python 3.8 or later.

One process prints whole lines: with `tail`, a line about the queue could split another line. The
arguments are the job's folder, the log's name in it, the job's ID ("" to print only what is there now), the
first line's number, and a mark ("" for none) for lines that say why the job waits or, after a tab, how an
unfinished line that rewrites itself looks now.
"""

from __future__ import annotations

import os
import re
import select
import sys
import time
from pathlib import Path

from .commands import ask, find_missing

# squeue is slower than reading the log, so it runs less often.
_READ_S, _ASK_S, _SOON_S = 0.05, 1.0, 0.2
_BLOCK = 1 << 20
LONGEST = 1 << 16
"""Longer lines are split into pieces of this many bytes."""
_LONG = re.compile(rb"^.{%d,}" % (LONGEST + 1), re.MULTILINE)
_STATE = 1000


def put(text: bytes) -> None:
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()


class LogReader:
    """Reads a log by name: it may not exist yet, or be replaced by a new submission."""

    def __init__(self, path: Path, skip: int) -> None:
        self._path, self._skip = path, skip
        self._file, self._rest = Path(os.devnull).open("rb"), b""  # noqa: SIM115

    def read(self) -> bytes | None:
        """Return new whole lines, without the skipped first ones; ``None`` if there are none."""
        block = self._file.read(_BLOCK)
        if not block:
            return b"" if self._reopen() else None
        whole, end, self._rest = _LONG.sub(_cut, self._rest + block).rpartition(b"\n")
        if not self._skip:
            return whole + end
        *skipped, left = (whole + end).split(b"\n", self._skip)
        self._skip -= len(skipped)
        return left

    def rest(self) -> bytes:
        """Return a last line that lacks its newline."""
        return b"" if self._skip else self._rest

    def state(self) -> bytes:
        """Return the last state of a line that rewrites itself, such as a progress bar; b"" for others."""
        before, _, last = self.rest().rstrip(b"\r").rpartition(b"\r")
        return last[-_STATE:] if before else b""

    def _reopen(self) -> bool:
        try:
            if os.path.samestat(self._path.stat(), os.fstat(self._file.fileno())):
                return False
            self._file.close()
            self._file, self._rest = self._path.open("rb"), b""
        except FileNotFoundError:
            return False
        return True


def _cut(line: re.Match[bytes]) -> bytes:
    return b"\n".join(line[0][at : at + LONGEST] for at in range(0, len(line[0]), LONGEST))


def follow(folder: Path, name: str, job: str, first: int, mark: str) -> None:
    """Print the log until the job ends or the reader is gone."""
    log, asked = LogReader(folder / name, first - 1), -_ASK_S
    reader = select.poll()
    reader.register(1, 0)  # for its end
    over, shown = not job, b""
    while True:
        # Read the rest of the log after the end is known.
        last, ended = over, (folder / "end.json").exists()
        while (lines := log.read()) is not None:
            put(lines)
        if last:
            put(log.rest())
            return
        if mark and shown != log.state():
            shown = log.state()
            put(mark.encode() + b"\t" + shown + b"\n")
        if time.monotonic() - asked >= (_SOON_S if ended else _ASK_S):
            asked = time.monotonic()
            # "" if the job is not in the queue; None if Slurm does not answer.
            state = ask(["squeue", "--noheader", f"--name={job}", "--format=%T %r"])
            # While the job runs, its end may be the work of its program.
            is_over = ended and (state is None or state.startswith("COMPLETING"))
            over = is_over or state == ""
            if mark and state and state.startswith("PENDING "):
                put(f"{mark}{find_missing(state.partition(' ')[2])}\n".encode())
        if not over and reader.poll(1000 * _READ_S):
            return


def main() -> None:
    try:
        follow(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
    except BrokenPipeError:
        os._exit(0)
