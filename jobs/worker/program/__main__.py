"""``python -m worker.program --folder F --output O [options] -- PROGRAM ARGS``: one rank.

It checks the rank's placement, runs the program, watches the other ranks (but not what their programs do),
and reports its exit code. A program that fails ends all other ranks: Hydra would leave them waiting, and
over several nodes it returns 255 for any exit code [tried: 2021.18].
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from ..runtime.errors import WorkerError
from ..runtime.events import MARK, Events, take_mark
from ..runtime.heartbeat import Heartbeat
from ..runtime.output import keep_log, last_words
from ..runtime.pinning import take_place
from ..runtime.process import leave, node_name, read_identity, read_words
from .environment import (
    add_packages,
    describe_end,
    make_parser,
    program_environment,
    requested_threads,
    start_output,
)
from .terminal import wait_for_session

_NO_PROGRAM = 127
_POLL_S = 0.1
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
GRACE_S = 30.0
"""Time for processes that the programs left running; mpirun would wait for them forever."""
_ABORTED = (
    "if it had already finished, torch may have aborted it on exit: call "
    "torch.distributed.destroy_process_group() at the end"
)
# The effect of another rank's failure.
_PEER = re.compile(r"gloo/|\bDist\w*Error\b")
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program as this rank. Returns its exit code, or 127 if there is no such program."""
    args, mark = _parse(argv), take_mark()
    events = Events(mark=mark)
    try:
        identity = read_identity(os.environ)
        events = Events(identity.rank, mark=mark)
        # Without torch, which may bind this thread to a CPU, and the program would inherit that.
        take_place(os.environ, requested_threads)
        own = read_words(Path(args.environment)) if args.environment else []
        environ = program_environment(os.environ, str(Path.cwd() / args.output), own)
        # For the reports of `speed_up`.
        environ[MARK] = mark
        add_packages(environ, args.packages, args.imports.split(":"))
        output = Path(environ["SPR_OUTPUT"])
        start_output(output, Path(args.folder))
        copier = None if args.terminal else keep_log(output, identity.rank, append=True)
        if args.output_dir:
            link = Path(args.folder, args.output_dir)
            link.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):  # by another rank of this node
                link.symlink_to(output)
    except WorkerError as error:
        events.error(error.message, error.hint)
        return 1
    program = [
        re.sub(r"\$SPR_OUTPUT\b", lambda _: environ["SPR_OUTPUT"], word) for word in args.program
    ]
    name = program[0]
    events.emit("running", node=os.environ.get("SLURMD_NODENAME", ""), folder=str(Path.cwd()))
    try:
        if args.terminal:
            asked = _note_stops()
            code, killed = wait_for_session(program, args.folder, environ, asked), None
        else:
            heartbeat = Heartbeat(identity, events)
            code, killed, asked = _run(program, args.folder, environ, heartbeat, copier)
            _end_rest(0 if code or asked else GRACE_S, asked, events, copier)
    except WorkerError as error:
        events.error(error.message, error.hint)
        return 1
    except OSError as error:
        hint = "is it installed on the nodes, or among the job's files, and executable?"
        where = f"{args.folder}: " if error.filename == args.folder else ""
        events.error(f"{name} can't be run: {where}{error.strerror}", hint, exit_code=_NO_PROGRAM)
        return _NO_PROGRAM
    if code and not asked:
        said = "" if args.terminal else last_words(output, identity.rank)
        why = _ABORTED if code == 128 + signal.SIGABRT else _explain_import(said)
        text = f"{describe_end(name, code, killed)}{': ' if said else ''}{said}"
        lost_peer = _PEER.search(said)
        events.error(text, why, exit_code=code, lost_peer=bool(lost_peer))
    return code


def _run(
    program: Sequence[str],
    folder: str,
    environ: dict[str, str],
    heartbeat: Heartbeat,
    copier: int | None,
) -> tuple[int, int | None, list[int]]:
    """Return the program's exit code, as a shell would, and the signals that asked it to stop.

    Between them is the program's process ID, if a signal ended it.
    """
    # All orphans of the program become children of this process, even those of `env -i setsid`.
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # mpirun may kill this process, and the kernel then kills the program.
    bound = partial(libc.prctl, _PR_SET_PDEATHSIG, signal.SIGKILL)
    # Files that mpirun opened stay open: the program may use MPI.
    child = subprocess.Popen(program, cwd=folder, env=environ, close_fds=False, preexec_fn=bound)
    asked = _note_stops(partial(_kill, child.pid))
    heartbeat.start()  # after the fork: preexec_fn and threads don't mix
    pid = status = 0
    while pid != child.pid:  # the others are orphans
        pid, status = os.wait()
    is_killed = os.WIFSIGNALED(status)
    code = child.returncode = 128 + os.WTERMSIG(status) if is_killed else os.WEXITSTATUS(status)
    if code == 0 and (heartbeat.is_first or _find_rest(copier)):
        heartbeat.stay()
    heartbeat.stop(goodbye=code == 0 or bool(asked))
    return code, child.pid if is_killed else None, asked


def _end_rest(grace_s: float, asked: Sequence[int], events: Events, copier: int | None) -> None:
    """Wait for processes that the program left running; then name and kill them."""
    until = time.monotonic() + grace_s
    while (left := _find_rest(copier)) and time.monotonic() < until and not asked:
        time.sleep(_POLL_S)
    if left and grace_s:
        named = ", ".join(f"{pid} ({words[:80]})" for pid, words in left.items())
        text = f"its program ended {grace_s:g} s ago and left processes running, which are killed"
        events.warn(f"warning: rank {events.rank} on {node_name()}: {text}: {named}")
    while left:
        for each in left:
            _kill(each, signal.SIGKILL)
        time.sleep(_POLL_S)
        left = _find_rest(copier)


def _find_rest(copier: int | None) -> dict[int, str]:
    """Return the command lines of this process's children by process ID, except its log's copier."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = stat.read_text(errors="replace").rpartition(")")[2].split()[:2]
            pid = int(stat.parent.name)
            if int(parent) == os.getpid() and state != "Z" and pid != copier:
                words = (stat.parent / "cmdline").read_bytes().decode(errors="replace")
                found[pid] = "".join(each if each.isprintable() else " " for each in words).strip()
    return found


def _kill(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _note_stops(act: Callable[[int], object] = lambda _: None) -> list[int]:
    """Return a list to which each signal that asks this rank to stop is added, after ``act``."""
    asked: list[int] = []

    def note(number: int, _frame: object) -> None:
        asked.append(number)
        act(number)

    for number in _FORWARDED:
        signal.signal(number, note)
    return asked


def _explain_import(said: str) -> str | None:
    """Return a hint for a module that is missing because it is in a project's ``src`` folder."""
    module = re.match(r"ModuleNotFoundError: No module named '(\w+)", said)
    if module and any(Path("work/src", f"{module[1]}{e}").exists() for e in ("", ".py")):
        return "src/ can be imported only with a pyproject.toml, or with --env PYTHONPATH=src"
    return None


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("program")
    parser.add_argument(
        "--output-dir", help="a folder of the program, made a link to the output folder"
    )
    parser.add_argument("--terminal", action="store_true", help="run it in the user's SSH session")
    parser.add_argument("program", nargs="+", help="after --: the program and its arguments")
    return parser.parse_args(argv)


if __name__ == "__main__":
    leave(main())
