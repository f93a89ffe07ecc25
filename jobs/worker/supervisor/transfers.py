"""Where a new checkpoint goes: to the disk of a second node, and to the job's bucket.

The supervisor's loop offers the newest one. A transfer runs beside the loop and the ranks, with low priority.
"""

from __future__ import annotations

import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from ..runtime.checkpoint_names import LAST, PATTERN, checkpoint_name
from ..storage.ownership import PUSH_S
from .commands import LOW_PRIORITY, Running
from .head import SSH
from .launch import CHECKPOINTS, Launch
from .watch import announce

_COPY_S = 900.0
AGAIN_S = 15.0
_KEPT = 2
# A complete checkpoint is renamed to its final name; then older copies are removed.
_TAKE = """set -e
mkdir -p {folder}; cd {folder}
rm -rf *.copy; mkdir {name}.copy; ({low} tar -C {name}.copy -xf -)
[ -s {name}.copy/{last} ]
[ -s {name}.copy/state.pt ]
rm -rf {name}; mv {name}.copy {name}
ls | grep -xE '{pattern}' | sort -V | head -n -{kept} | xargs -r rm -rf
"""
_TAKEN = {"last": LAST, "pattern": PATTERN, "kept": _KEPT, "low": LOW_PRIORITY}
# Not imported here: boto3 would delay the start and the end of every job.
_PUSH = "worker.storage.push"


@dataclass
class Transfer(ABC):
    """Brings each new checkpoint to another place, one at a time, and tries again after a failure."""

    kept: int = field(default=-1, init=False)
    """The step of the newest checkpoint that is there."""
    _step: int = field(default=-1, init=False)
    _running: Running | None = field(default=None, init=False)
    _due: float = field(default=0.0, init=False)
    _warned: bool = field(default=False, init=False)

    @abstractmethod
    def start(self, step: int) -> Running:
        """Start to bring this checkpoint there."""

    @abstractmethod
    def fail(self, step: int, why: str) -> None:
        """Take a failure, before the next try."""

    def turn(self, newest: int, now: float) -> None:
        """Take the end of a transfer, and start the next one. ``newest`` is the checkpoint's step."""
        if self._running and self._running.poll():
            if self._running.why:
                self._due = now + AGAIN_S
                self.fail(self._step, self._running.why)
            else:
                self.kept = self._step
            self._running = None
        if self._running is None and newest > self.kept and now >= self._due:
            self._step, self._running = newest, self.start(newest)

    def hurry(self) -> None:
        """Forget the pause after an earlier failure: the next try is the last."""
        self._due = 0.0

    def is_settled(self, newest: int, now: float) -> bool:
        """Return whether the newest checkpoint is there, or can't be brought there now."""
        return self._running is None and (newest <= self.kept or now < self._due)

    def warn_once(self, text: str) -> None:
        if not self._warned:
            announce(event="note", text=f"warning: {text}")
        self._warned = True


@dataclass
class Copies(Transfer):
    """Copies to another node, so that losing one node loses no checkpoint."""

    folder: str
    to: list[str]
    """Candidate nodes; the first is in use. If it fails, it moves to the end."""
    leaving: Callable[[], Collection[str]] = tuple
    """Returns the nodes that can't keep a copy, such as those being reclaimed by EC2."""

    def turn(self, newest: int, now: float) -> None:
        if self._running is None:
            # A leaving node takes copies only if there is no other.
            gone, first = self.leaving(), self.to[0]
            self.to.sort(key=gone.__contains__)
            self.kept = self.kept if self.to[0] == first else -1
        super().turn(newest, now)

    def start(self, step: int) -> Running:
        folder, name = f"{self.folder}/{CHECKPOINTS}", checkpoint_name(step)
        pack = shlex.join(["tar", "-C", f"{folder}/{name}", "-cf", "-", "."])
        take = _TAKE.format(folder=shlex.quote(folder), name=name, **_TAKEN)
        script = f"set -o pipefail; {pack} | {shlex.join([*SSH, self.to[0], take])}"
        return Running(["sh", "-c", f"{LOW_PRIORITY} bash -c {shlex.quote(script)}"], _COPY_S)

    def fail(self, step: int, why: str) -> None:
        name, node = checkpoint_name(step), self.to[0]
        if not Path(self.folder, CHECKPOINTS, name).exists():
            self._due = 0.0  # it was removed meanwhile: a newer one exists
            return
        self.to.append(self.to.pop(0))
        self.warn_once(f"no second copy of checkpoint {name}: {node} does not take it")


@dataclass
class Uploads(Transfer):
    """Stores the job's inputs, for which -1 stands, and then each new checkpoint in its bucket."""

    launch: Launch
    kept: int = field(default=-2, init=False)

    def start(self, step: int) -> Running:
        return Running(["sh", "-c", render_push(self.launch, "checkpoint")], PUSH_S)

    def fail(self, step: int, why: str) -> None:
        what = f"checkpoint {checkpoint_name(step)}" if step >= 0 else "its inputs"
        self.warn_once(f"{what} can't be stored: {why}")


def render_push(launch: Launch, what: str) -> str:
    """Return the shell command that stores a part of the job's folder in its bucket."""
    push = shlex.join([sys.executable, "-m", _PUSH, what, ".", launch.bucket])
    folder = shlex.quote(launch.folder)
    return f"cd {folder} || exit; export PYTHONPATH=code; {LOW_PRIORITY} {push}"
