"""A run's output folder: prepared before the work; each file is written atomically.

model/          the trained model, if the job saves it
tensorboard/, wandb/  files of :mod:`.trackers`, on rank 0's machine
results.json    written last: its presence means that the rest is complete

Beside it is :func:`state_folder`, for what the runtime itself writes:

checkpoints/    the state to resume from; on rank 0's machine
metrics/        rank-N.jsonl, each on its rank's machine: a JSON object per step (:class:`StepFigures`)
logs/           rank-N.log, likewise: what the rank printed, in addition to the merged log of all ranks
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from .checkpoint_names import CHECKPOINTS, newest
from .errors import TrainingError
from .events import PREFIX
from .process import NODES, read_local_place

LOGS, METRICS, RESULTS = "logs", "metrics", "results.json"
FLUSH_SECONDS = 5.0
"""Minimum time between writes of metrics: a killed process loses at most this much, a checkpoint none."""

_TAIL = 1 << 16
_RANK = re.compile(r"\[rank\d+\]: ?")
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(: |$)")


def state_folder(output: Path) -> Path:
    """Return the runtime's own folder for a run whose output goes to ``output``: ``output.state``."""
    return Path(f"{output.absolute()}.state")


def prepare_output(folder: Path, *, resume: bool) -> None:
    """Create the folder, and remove an earlier run's results and checkpoints.

    Raises :class:`TrainingError` if the folder can't be written, or holds an unfinished run. This is
    checked before the work starts, to avoid a failure after hours and an earlier run's results.
    """
    results, state = folder / RESULTS, state_folder(folder)
    if not resume and not results.exists() and newest((state / CHECKPOINTS).glob("*")):
        raise TrainingError(
            f"--output {folder} holds the checkpoints of an unfinished run",
            hint=f"continue it with --resume, choose another folder, or remove {state}",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        results.touch()
        if not resume:
            shutil.rmtree(state / CHECKPOINTS, ignore_errors=True)
        results.unlink()
    except OSError as error:
        raise TrainingError(f"--output {folder} can't be written: {error.strerror}") from error


def save_json(path: Path, content: object) -> None:
    """Write a JSON file atomically. Raises :class:`TrainingError`."""
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    with replacing(path) as partial:
        partial.write_text(f"{text}\n", encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Like :func:`new_file`, but raises :class:`TrainingError`."""
    try:
        with new_file(path) as partial:
            yield partial
    except OSError as error:
        raise TrainingError(f"{path} can't be written: {error.strerror or error}") from error


@contextmanager
def new_file(path: Path, suffix: str = "", *, replace: bool = True) -> Iterator[Path]:
    """Yield the file to write, which becomes ``path`` when it is complete: a context manager.

    ``suffix``, such as ``.node1-4242``, tells this process from others that may write the same file now.
    Without ``replace``, the first one's file stays. Raises ``OSError``.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        yield path  # a device, such as /dev/stdout, which root would replace by a file
        return
    partial = path.with_name(f".{path.name}{suffix}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        if not replace:
            with suppress(OSError):  # there is one, or the file system has no hard links
                os.link(partial, path)
        if replace or not path.exists():
            partial.replace(path)
    finally:
        with suppress(OSError):
            partial.unlink()


def hold_lock(file: IO[Any]) -> None:
    """Wait for the lock of an open file, if its file system has locks. Raises ``OSError``.

    Lustre mounted with ``noflock`` has none, nor has NFS without lockd.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise


def keep_log(output: Path, rank: int, *, append: bool) -> int | None:
    """Copy all further output of this process to ``logs/rank-N.log``; return the copying process's ID.

    That process, :mod:`.copy_output`, prints whole lines, and outlives this one, so that a crash's last lines
    are kept. If the folder can't be written, there is no log, and no process; :func:`prepare_output` reports
    the error.
    """
    path = state_folder(output) / LOGS / f"rank-{rank}.log"
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if os.environ.get(NODES):  # the node's folders are its own
            local = read_local_place(os.environ)
            first = rank - local.rank
            _take_over(state_folder(output), range(first, first + local.size))
        if not append:
            path.write_bytes(b"")
        sys.stdout.flush()
        sys.stderr.flush()
        copier = _start_copier(path)
        assert copier.stdin is not None
        for descriptor in (1, 2):
            os.dup2(copier.stdin.fileno(), descriptor)
        copier.stdin.close()
        # It ends last, so nothing waits for it, about which Popen would warn.
        copier.returncode = 0
        return copier.pid
    return None


def _take_over(state: Path, ranks: range) -> None:
    """Give the files of ranks that this node had before to those that it has now, in their order.

    Unless there are as many, files of other ranks are removed. The first rank to take the lock does it.
    """
    with (state / "ranks.lock").open("w") as lock:
        hold_lock(lock)
        for folder in (LOGS, METRICS):
            files = {int(path.stem[5:]): path for path in (state / folder).glob("rank-*.*")}
            others = files.keys() - {*ranks}
            if others and len(files) == len(ranks):
                # A new name may be that of a file not yet renamed.
                former = (files[rank] for rank in sorted(files))
                moved = [path.replace(path.with_name(f".{path.name}")) for path in former]
                for path, rank in zip(moved, ranks):  # noqa: B905 - Python 3.8
                    path.replace(path.with_name(f"rank-{rank}{path.suffix}"))
            else:
                for rank in others:
                    files[rank].unlink()


def last_words(output: Path, rank: int) -> str:
    """Return the last line that this rank printed, preferably one that names a Python exception."""
    until = time.monotonic() + 2
    try:
        # What the copier has not read yet.
        while any(fcntl.ioctl(1, termios.FIONREAD, bytes(4))) and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.1)
        return last_line(state_folder(output) / LOGS / f"rank-{rank}.log")
    except OSError:
        return ""


def last_line(log: Path) -> str:
    """Return a log's last line, preferably one that names a Python exception. Raises ``OSError``."""
    with log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
        text = file.read().decode(errors="replace")
    printed = [_RANK.sub("", line) for line in text.splitlines() if not line.startswith(PREFIX)]
    lines = [line for line in printed if line.strip()][-20:]
    indented = [line.startswith("  ") for line in lines]
    named = [b for at, b in enumerate(lines) if at and indented[at - 1] and _EXCEPTION.match(b)]
    return ([*lines, *named] or [""])[-1].strip()[:500]


def _start_copier(path: Path) -> subprocess.Popen[bytes]:
    """Start a process that outlives a signal to the job's processes.

    It has its own session, but Slurm still finds it. It starts with the signal blocked; this process
    receives a signal that arrives meanwhile right afterward.
    """
    program = str(Path(__file__).with_name("copy_output.py"))
    # Isolated and without site-packages and the rank's allocator: it starts in 20 ms and takes 9 MB.
    argv = [sys.executable, "-I", "-S", program, str(path)]
    environ = {name: text for name, text in os.environ.items() if name != "LD_PRELOAD"}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        return subprocess.Popen(argv, env=environ, stdin=subprocess.PIPE, start_new_session=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class StepFigures(NamedTuple):
    """One rank's metrics of one step.

    ``time`` is in seconds since training began, without interruptions; ``loss`` is the mean of all ranks;
    ``padded`` counts tokens with padding, ``tokens`` without; ``seconds`` are those of the step by activity.
    """

    step: int
    time: float
    loss: float
    lr: float
    samples: int
    tokens: int
    padded: int
    seconds: Mapping[str, float]


class Metrics:
    """One rank's metrics file, flushed at the end of a ``with`` block.

    A full disk does not stop training: ``note`` gets one warning, and the lines are kept until there
    is room.
    """

    def __init__(
        self,
        output: Path,
        rank: int,
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._note, self._warned = note, False
        self._path = state_folder(output) / METRICS / f"rank-{rank}.jsonl"
        self._clock = clock
        self._lines: list[str] = []
        self._written = clock()

    def begin(self, step: int) -> None:
        """Keep the lines up to a step and drop later ones, whose steps will be repeated.

        Raises :class:`TrainingError` if the file can't be written.
        """
        with replacing(self._path) as partial:
            kept = _lines_until(self._path, step) if step and self._path.exists() else []
            partial.write_text("".join(kept), encoding="utf-8")

    def add(self, figures: StepFigures) -> None:
        """Add one step's metrics, to be written within seconds."""
        times = {name: round(value, 6) for name, value in figures.seconds.items()}
        fields = {**figures._asdict(), "time": round(figures.time, 4), "seconds": times}
        self._lines.append(json.dumps(fields) + "\n")
        if self._clock() - self._written >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write the added lines, if the disk has room."""
        self._written = self._clock()
        size = None
        try:
            with self._path.open("ab") as file:
                size = file.tell()
                file.write("".join(self._lines).encode())
            self._lines = []
        except OSError as error:
            if size is not None:
                with suppress(OSError):  # no duplicate and no partial lines
                    os.truncate(self._path, size)
            if not self._warned:
                self._note(f"warning: {self._path} can't be written: {error.strerror}")
            self._warned = True

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()


def _lines_until(path: Path, step: int) -> list[str]:
    """Return the complete lines up to a step; a killed process may have left a partial one."""
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            known = json.loads(line)["step"] <= step
        except (ValueError, KeyError, TypeError, RecursionError):
            break
        if not known or not line.endswith("\n"):
            break
        kept.append(line)
    return kept
