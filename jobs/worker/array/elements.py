"""The elements of one rank: each in its own process, with its own output and log. Runs on Python 3.8."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..pool.rank import PoolRank, child_environment, die_with_parent, render_take, send_below
from ..program.environment import add_packages, describe_end, program_environment
from ..runtime.output import last_line, save_json
from ..runtime.process import node_name
from .plan import ELEMENTS, END, INDEX, LOG, OUTPUT, ArrayPlan

_NO_PROGRAM = 127
_LONE = ("LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1")


def end_group(process: Any, number: int = signal.SIGTERM) -> None:
    """Send a signal to an element and all processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


@dataclass
class Delivery:
    """Sends ended elements to another node and reports them, while the next one runs.

    Those that end while others are sent are sent together: a connection takes longer than a short element.
    """

    rank: PoolRank
    to: str = ""
    _is_first: bool = False
    """Whether the other node is that of rank 0, which must have them."""
    _waiting: deque[Mapping[str, Any]] = field(default_factory=deque)
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    _sent: list[Any] = field(default_factory=list)

    def __enter__(self) -> Delivery:
        self.to, self._is_first = self.rank.remote.call(
            "join", self.rank.identity.rank, node_name()
        )
        if self._is_first:  # what this node published as the first one of an earlier attempt
            shutil.rmtree(Path(OUTPUT) / ELEMENTS, ignore_errors=True)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._thread.shutdown()
        if kind is None:
            self._note_sent()

    def put(self, end: Mapping[str, Any]) -> None:
        """Deliver an ended element."""
        self._waiting.append(end)
        self._sent.append(self._thread.submit(self._deliver))
        self._note_sent()

    def _note_sent(self) -> None:
        """Forget what was delivered. Raises the error of what was not."""
        self._sent = [each for each in self._sent if not each.done() or each.result()]

    def _deliver(self) -> None:
        ends = [self._waiting.popleft() for _ in range(len(self._waiting))]
        names = [str(end["element"]) for end in ends]
        take = render_take(Path.cwd() / ELEMENTS, f"from-{self.rank.identity.rank}")
        try:
            if names and self.to:  # an unreadable file is its element's failure
                send_below(ELEMENTS, names, self.to, take, "--ignore-failed-read")
        except OSError as error:
            if self._is_first:
                raise
            self.rank.events.warn(f"warning: {error}; elements are only on {node_name()}")
            self.to = ""
        for end in ends:
            self.rank.remote.call("tell", end)


def find_unreadable(folder: Path) -> str:
    """Return a file or folder that can't be read; "" if all can."""
    # Not by rglob, which fails if a process that was left running removes a folder meanwhile.
    for where, folders, files in os.walk(folder):
        for names, needed in ((folders, os.R_OK | os.X_OK), (files, os.R_OK)):
            for path in (Path(where, name) for name in names):
                if not os.access(path, needed) and not path.is_symlink() and path.exists():
                    return str(path.relative_to(folder))
    return ""


@dataclass
class ElementRunner:
    """Runs elements, one by one, in the job's folder."""

    rank: PoolRank
    plan: ArrayPlan
    args: argparse.Namespace
    own: Sequence[str]
    """The user's ``NAME=VALUE`` words."""

    def run_all(self) -> None:
        """Run elements until none is left, or this process is to stop."""
        with Delivery(self.rank) as delivery:
            while not self.rank.stop.requested:
                index = self.rank.remote.call("ask", self.rank.identity.rank)
                if index is None:
                    return
                if end := self._run(index):
                    delivery.put(end)

    def _run(self, index: int) -> dict[str, Any] | None:
        """Run one element; return its end, ``None`` if it was interrupted."""
        box = ELEMENTS / str(index)
        shutil.rmtree(box, ignore_errors=True)
        (box / OUTPUT).mkdir(parents=True)
        begin = time.monotonic()
        with (box / LOG).open("wb") as log:
            code, message = self._call(index, log)
        if code is None:
            return None
        end = {
            "element": index,
            "variables": self.plan.elements[index],
            "host": node_name(),
            "seconds": round(time.monotonic() - begin, 3),
            "exit_code": code,
        }
        if code:
            said = last_line(box / LOG)
            end["message"] = message + (f": {said}" if said else "")
        elif name := find_unreadable(box):
            end.update(exit_code=1, message=f"its output can't be kept: {name} can't be read")
        save_json(box / END, end)
        return end

    def _call(self, index: int, log: Any) -> tuple[int | None, str]:
        """Return the program's exit code, as a shell would, and its end in words."""
        environ, words = self.prepare(index)
        try:
            process = subprocess.Popen(
                words,
                cwd=self.args.folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        except OSError as error:
            return _NO_PROGRAM, f"{words[0]} can't be run: {error.strerror}"
        stop = self.rank.stop
        stop.watch(process)
        code = process.wait()
        stop.process = None
        end_group(process, signal.SIGKILL)  # what it left running
        # One that was told to stop may exit with 0, and one that finished in that moment runs again.
        if stop.has_ended(code):
            return None, ""
        if code < 0:
            return 128 - code, describe_end(words[0], 128 - code, process.pid)
        return code, describe_end(words[0], code)

    def prepare(self, index: int) -> tuple[dict[str, str], list[str]]:
        """Return an element's environment, and its program's words with the values of its variables."""
        output = str(Path.cwd() / ELEMENTS / str(index) / OUTPUT)
        variables = {**self.plan.elements[index], INDEX: str(index)}
        own = [*_LONE, *self.own, *(f"{name}={value}" for name, value in variables.items())]
        environ = program_environment(child_environment(os.environ), output, own)
        add_packages(environ, self.args.packages, self.args.imports.split(":"))
        known = {**variables, "SPR_OUTPUT": environ["SPR_OUTPUT"]}
        pattern = re.compile(rf"\$({'|'.join(known)})\b")
        return environ, [pattern.sub(lambda m: known[m[1]], word) for word in self.plan.program]
