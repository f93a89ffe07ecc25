"""Which element runs next, and what has ended: rank 0's side of an array. Runs on Python 3.8.

The files ``elements/N/end.json`` on its node say what has ended. An element's files reach this node before
its end counts, and a second node has them as well. So an array that starts again, without any one of its
nodes, runs no element twice whose end was reported.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ..pool.rank import render_take
from ..runtime.events import Events
from ..runtime.output import LOGS, RESULTS, save_json, state_folder
from ..runtime.pinning import format_cpus
from ..runtime.process import node_name
from ..supervisor.commands import SSH_FAILED, ask, succeeds
from ..supervisor.head import SSH
from ..supervisor.launch import LAUNCH
from ..supervisor.nodes import order_nodes
from .plan import ELEMENTS, END, LOG, OUTPUT, ArrayPlan

_COPY_S, _BATCH = 1800.0, 32
_NAMED = 5


def other_nodes(folder: Path, here: str) -> list[str]:
    """Return the other nodes that the job may use, the head first."""
    with suppress(OSError):
        launch = json.loads((folder / LAUNCH).read_text())
        return order_nodes(launch["pinning"], here, launch["head"])
    return []


def read_ends(folder: Path) -> dict[int, dict[str, Any]]:
    """Return how the elements that have ended did, by their indexes, as far as this node knows."""
    paths = (folder / ELEMENTS).glob(f"*/{END}")
    ends = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    return {each["element"]: each for each in ends}


def gather(folder: Path, nodes: Iterable[str]) -> None:
    """Bring ended elements that this node lacks from others, as far as they answer."""
    place = folder / ELEMENTS
    for node in nodes:
        listing = f"cd {place} 2>/dev/null && ls -d */{END}"
        there = {line.partition("/")[0] for line in (ask([*SSH, node, listing]) or "").split()}
        lacking = sorted(there - {str(index) for index in read_ends(folder)})
        for at in range(0, len(lacking), _BATCH):
            pack = f"tar -C {place} -cf - {' '.join(lacking[at : at + _BATCH])}"
            take = render_take(place, "gathered")
            # A file that can't be read costs no other element; a node that is gone costs no more time.
            script = f"{shlex.join([*SSH, node, pack])} < /dev/null | ({take}); "
            script += f"[ ${{PIPESTATUS[0]}} != {SSH_FAILED} ]"
            if not succeeds(["bash", "-c", script], _COPY_S):
                break


@dataclass
class ArrayCoordinator:
    """An array in the job's folder. Its methods take and return what JSON can hold.

    Only one thread may use it.
    """

    SERVED: ClassVar[Any] = ("ask", "tell", "is_over", "join")

    plan: ArrayPlan
    folder: Path
    events: Events
    ranks: int = 1
    second: str = ""
    """The node that gets what has ended on this one; "" for none."""
    hosts: dict[int, str] = field(default_factory=dict)
    _dismissed: int = 0
    _working: set[int] = field(default_factory=set)
    """The ranks that run an element, or are about to ask for the next one."""
    _running: set[int] = field(default_factory=set)
    """The elements that have begun, and whose end is not reported yet."""
    _begin: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.ended = {
            i: end for i, end in read_ends(self.folder).items() if i in self.plan.elements
        }
        self._left = [index for index in self.plan.elements if index not in self.ended]
        for index, end in self.ended.items():
            self.ended[index] = self._publish(end)
        self._report()

    def join(self, rank: int, host: str) -> tuple[str, bool]:
        """Take a rank's host; return the node that gets its elements, and whether that is this one."""
        self.hosts[rank] = host
        here = node_name()
        return (self.second, False) if host == here else (here, True)

    def ask(self, rank: int) -> int | None:
        """Return the next element; ``None`` if nothing is left for this rank to do."""
        is_full = 0 < self.plan.limit <= len(self._working - {rank})
        if is_full or not self._left:
            self._working.discard(rank)
            self._dismissed += 1
            return None
        self._working.add(rank)
        self._running.add(self._left[0])
        return self._left.pop(0)

    def is_over(self) -> bool:
        """Return whether every rank knows that nothing is left to do, and has reported what it did."""
        return self._dismissed >= self.ranks and not self._running

    def tell(self, end: Mapping[str, Any]) -> None:
        """Take an element's end; its files are on this node already."""
        index = int(end["element"])
        end = self.ended[index] = self._publish(end)
        self._running.discard(index)
        if end["exit_code"]:
            where = f"{end['seconds']:.0f} s on {end['host']}; see `logs --element {index}`"
            self.events.note(f"element {index} failed: {end['message']} ({where})")
        self._report()

    def _publish(self, end: Mapping[str, Any]) -> dict[str, Any]:
        """Add an element's files to the results; return its end, a failure if they can't be added."""
        index = int(end["element"])
        try:
            self._link(index)
        except OSError as error:  # shutil.Error has a list of what failed
            found = error.args[0][0][-1] if isinstance(error, shutil.Error) else error
            if not end["exit_code"]:
                return {**end, "exit_code": 1, "message": f"its output can't be kept: {found}"}
        return dict(end)

    def _link(self, index: int) -> None:
        """Add an element's files to the results, as links: they may be large."""
        box, output = self.folder / ELEMENTS / str(index), self.folder / OUTPUT
        target = output / ELEMENTS / str(index)
        log = state_folder(output) / LOGS / f"element-{index}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        os.link(box / LOG, log)
        shutil.rmtree(target, ignore_errors=True)
        # The element may have removed its folder.
        if (box / OUTPUT).is_dir() and any((box / OUTPUT).iterdir()):
            shutil.copytree(box / OUTPUT, target, symlinks=True, copy_function=os.link)

    def _report(self) -> None:
        known = {"done": len(self.ended), "failed": len(self.failed)}
        self.events.emit("elements", **known, total=len(self.plan.elements))

    @property
    def failed(self) -> list[int]:
        return sorted(index for index, end in self.ended.items() if end["exit_code"])

    def save(self) -> None:
        """Write ``results.json``."""
        ends = [self.ended[index] for index in sorted(self.ended)]
        seconds = {"total": round(time.monotonic() - self._begin, 3)}
        results = {"elements": ends, "failed": self.failed, "seconds": seconds}
        save_json(self.folder / OUTPUT / RESULTS, results)

    def find_failure(self) -> tuple[str, str]:
        """Return which elements have failed, and the remedy; "" for none."""
        if not (failed := self.failed):
            return "", ""
        named = ", ".join(map(str, failed[:_NAMED])) + (", …" if len(failed) > _NAMED else "")
        rows = format_cpus(failed)
        limit = f"%{self.plan.limit}" if self.plan.limit else ""
        again = shlex.quote((f"{self.plan.file}:{rows}" if self.plan.file else rows) + limit)
        return (
            f"{len(failed)} of {len(self.plan.elements)} elements failed: {named}",
            f"to run only these again: the same command with --array {again}",
        )
