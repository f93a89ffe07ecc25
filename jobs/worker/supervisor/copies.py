"""Second copies of checkpoints on another node: no single node's loss may take all of them."""

from __future__ import annotations

import shlex
import subprocess
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from .commands import succeeds
from .head import SSH
from .launch import CHECKPOINTS
from .nodes import parse_state
from .watch import announce

_LOOK_S, _AGAIN_S, _COPY_S, _LAST_S = 1.0, 15.0, 900, 60
_KEPT = 2
# The checkpoint gets its name when it is complete; then older copies are removed.
_TAKE = """set -e
mkdir -p {folder}; cd {folder}
rm -rf {name}.copy; mkdir {name}.copy; nice tar -C {name}.copy -xf -
[ -s {name}.copy/checkpoint.json ] && [ -s {name}.copy/state.pt ]
rm -rf {name}; mv {name}.copy {name}
ls | grep -x 'step-[0-9]*' | sort -V | head -n -{kept} | xargs -r rm -rf
"""


@dataclass
class CheckpointCopier:
    """Copies each new checkpoint to another node, one at a time, with low priority."""

    folder: str
    to: list[str]
    """The nodes that may have them. The first one has; if it fails, it becomes the last one."""
    leaving: Callable[[], Collection[str]] = tuple
    """Returns the nodes that can't keep a copy, such as those that EC2 takes back."""
    newest: int = -1
    """The step of the newest checkpoint that is there."""
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _warned: bool = False

    def start(self) -> None:
        """Copy what comes from now on."""
        if self.to:
            self._thread = threading.Thread(target=self._copy_all, daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Wait until the newest one is copied, for a limited time."""
        self._ended.set()
        if self._thread:
            self._thread.join(_LAST_S)

    def _copy_all(self) -> None:
        last, pause = False, _LOOK_S
        while not last:
            last, pause = self._ended.wait(pause), _LOOK_S
            self._prefer_staying()
            step = self._find_newest()
            if step <= self.newest:
                continue
            if self._copy(f"step-{step:06d}"):
                self.newest = step
            else:
                self.to.append(self.to.pop(0))
                pause = _AGAIN_S

    def _prefer_staying(self) -> None:
        """Copy to a node that goes only if there is no other."""
        gone, first = self.leaving(), self.to[0]
        self.to.sort(key=gone.__contains__)
        if self.to[0] != first:
            self.newest = -1

    def _find_newest(self) -> int:
        with suppress(OSError):
            names = [path.name for path in Path(self.folder, CHECKPOINTS).iterdir()]
            return parse_state("\n".join(names)).newest
        return -1

    def _copy(self, name: str) -> bool:
        folder = f"{self.folder}/{CHECKPOINTS}"
        take = _TAKE.format(folder=shlex.quote(folder), name=name, kept=_KEPT)
        pack = ["nice", "-n", "19", "tar", "-C", f"{folder}/{name}", "-cf", "-", "."]
        argv = ["nice", "-n", "19", *SSH, self.to[0], take]
        quiet = subprocess.DEVNULL
        with subprocess.Popen(pack, stdout=subprocess.PIPE, stderr=quiet) as source:
            if succeeds(argv, _COPY_S, stdin=source.stdout, stderr=quiet):
                return True
            source.kill()
        # One that was removed meanwhile has a newer one after it.
        if Path(folder, name).exists() and not self._warned:
            self._warned = True
            text = f"warning: no second copy of checkpoint {name}: {self.to[0]} does not take it"
            announce(event="note", text=text)
        return False
